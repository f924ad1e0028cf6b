//! An engine of a node, as a model: it takes shares over, computes pages layer by layer in the node's
//! memory, and answers. It is the workload, not what is tested; but what it reads it uses, so that a wrong
//! byte becomes a wrong answer.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kvasir_blocks::AttachEpoch;
use kvasir_blocks::moving::engine_stops::{EngineStops, Progress};
use kvasir_proto::{BlockKey, Share, Side, SlotIndex, keys};

use crate::calls::{FromEngine, LegStart, Reply, ToEngine};
use crate::checkers::UNWRITTEN;
use crate::content::{self, BLOCK_TOKENS, LAYERS, PageBytes, SLOT_BYTES};
use crate::context::{Context, Event};
use crate::node::Running;
use crate::seen::{Life, Seen};

/// Pages that one chunk of a prefill computes.
const CHUNK_PAGES: u32 = 2;
/// Handles of `get` that an engine uses.
pub const HANDLES_MAX: u64 = 4;
const ALIVE_US: u64 = 100_000;
/// Shares that an engine remembers to have let go of.
const OVER_MAX: usize = 256;

#[derive(Debug)]
pub struct Engine {
    pub epoch: AttachEpoch,
    /// Which of its node's.
    pub index: usize,
    tasks: BTreeMap<Share, Task>,
    /// Let go of: told again to begin, it does not.
    over: Vec<Share>,
    step: u32,
    /// When its next step is.
    step_at_us: Option<u64>,
    /// Shared memory keeps the order of what is said, either way.
    heard_until_us: u64,
    said_until_us: u64,
    pub stalled_until_us: u64,
    alive_us: u64,
    /// Handles of `get` that hold something.
    handles: BTreeSet<u64>,
    /// What its progress word says.
    pub progress: Option<Progress>,
    /// The node does not listen to it any more.
    pub expelled: bool,
    /// What the node has told it to stop.
    pub stops: EngineStops,
    pool: Pool,
}

/// Pages of its own, of which its block manager knows.
#[derive(Debug, Default)]
struct Pool {
    free: Vec<u32>,
    /// Asked back, and not to be used yet.
    dropping: BTreeMap<u64, Vec<u32>>,
    drops: u64,
}

#[derive(Debug)]
struct Task {
    leg: LegStart,
    state: State,
    slots: Vec<SlotIndex>,
    /// Prompt, and then what was answered.
    tokens: Vec<u32>,
    prompt_tokens: usize,
    answer: Vec<u32>,
    cached_pages: u32,
    /// Pages that it computes in its pool, and where.
    in_pool: BTreeMap<u32, u32>,
    /// It computes no token before.
    next_token_us: u64,
}

#[derive(Debug)]
enum State {
    /// For its slots.
    Binding,
    /// Decode side: for its pages.
    WaitsForPages,
    /// A chunk: its pages' rows, and how many layers are written.
    Prefilling { pages: Range<u32>, rows: Vec<PageBytes>, layers: u16 },
    /// It may compute the next token.
    Decoding,
    /// For room.
    Growing,
}

impl Engine {
    pub fn new(epoch: AttachEpoch, index: usize, now_us: u64, pool_pages: u32) -> Self {
        Engine {
            epoch,
            index,
            tasks: BTreeMap::new(),
            over: Vec::new(),
            step: 0,
            step_at_us: None,
            heard_until_us: now_us,
            said_until_us: now_us,
            stalled_until_us: 0,
            alive_us: 0,
            handles: BTreeSet::new(),
            progress: None,
            expelled: false,
            stops: EngineStops::default(),
            pool: Pool { free: (0..pool_pages).collect(), ..Pool::default() },
        }
    }

    /// Pages that it has asked back by this handle.
    pub fn dropping(&self, handle: u64) -> Option<&[u32]> {
        self.pool.dropping.get(&handle).map(Vec::as_slice)
    }

    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// The node says something to it.
    pub fn tell(&mut self, context: &mut Context, at: Life, message: ToEngine) {
        let us = context.now_us
            + context.chance("tell", at.node as u64, self.tasks.len() as u64).between(1, 20);
        self.heard_until_us = self.heard_until_us.max(us);
        let event = Event::ToEngine { at, epoch: self.epoch, message };
        context.at(self.heard_until_us, event);
    }

    /// It says something to the node.
    pub fn say(&mut self, context: &mut Context, at: Life, message: FromEngine) {
        let us =
            context.now_us + context.chance("say", at.node as u64, self.step.into()).between(1, 20);
        self.said_until_us = self.said_until_us.max(us);
        let event = Event::FromEngine { at, epoch: self.epoch, message };
        context.at(self.said_until_us, event);
    }

    pub fn wants_step(&mut self, context: &mut Context, at: Life) {
        let us = context.chance("step", at.node as u64, 0).between(20, 120);
        self.steps_at(context, at, context.now_us + us);
    }

    fn steps_at(&mut self, context: &mut Context, at: Life, at_us: u64) {
        if self.step_at_us.is_none_or(|step_us| step_us > at_us) {
            self.step_at_us = Some(at_us);
            context.at(at_us, Event::EngineStep { at, epoch: self.epoch });
        }
    }

    fn let_go(&mut self, context: &mut Context, at: Life, share: Share) {
        let in_pool = self.tasks.remove(&share).map(|task| task.in_pool).unwrap_or_default();
        if !in_pool.is_empty() {
            self.pool.drops += 1;
            let (handle, pages) = (self.pool.drops, in_pool.into_values().collect::<Vec<u32>>());
            self.pool.dropping.insert(handle, pages.clone());
            self.say(context, at, FromEngine::DropPages { handle, pages });
        }
        if self.over.len() >= OVER_MAX {
            self.over.remove(0);
        }
        self.over.push(share);
        self.say(context, at, FromEngine::Release { share });
    }
}

/// What an engine hears.
pub fn hear(node: &mut Running, context: &mut Context, epoch: AttachEpoch, message: ToEngine) {
    let at = node.at;
    let Some(engine) = node.engine_mut(epoch) else { return };
    match message {
        ToEngine::Start(leg) => {
            let share = leg.share;
            if engine.tasks.contains_key(&share) || engine.over.contains(&share) {
                return;
            }
            let prompt = context.plan.requests[leg.request].prompt.clone();
            let task = Task {
                state: State::Binding,
                slots: Vec::new(),
                prompt_tokens: prompt.len(),
                tokens: prompt,
                answer: Vec::new(),
                cached_pages: 0,
                in_pool: BTreeMap::new(),
                next_token_us: 0,
                leg,
            };
            engine.tasks.insert(share, task);
            engine.say(context, at, FromEngine::Bind { share });
        }
        ToEngine::Bound { share, bound: None } => {
            engine.tasks.remove(&share);
        }
        ToEngine::Bound { share, bound: Some(bound) } => {
            let Some(task) = engine.tasks.get_mut(&share) else {
                // It has given up meanwhile.
                return engine.say(context, at, FromEngine::Release { share });
            };
            task.slots = bound.slots;
            task.cached_pages = bound.cached_tokens / BLOCK_TOKENS;
            task.state = match share.side {
                Side::Decode => State::WaitsForPages,
                _ => State::Prefilling { pages: 0..task.cached_pages, rows: Vec::new(), layers: 0 },
            };
            if share.side != Side::Decode {
                engine.wants_step(context, at);
            }
        }
        ToEngine::Ready { share, tail } => ready(node, context, (epoch, share), &tail),
        ToEngine::Stop { share } => engine.let_go(context, at, share),
        ToEngine::Grown { share, slots } => {
            let Some(task) = engine.tasks.get_mut(&share) else { return };
            if slots.is_empty() {
                // No room: the answer ends here, and nobody is told another one.
                return engine.let_go(context, at, share);
            }
            task.slots.extend(slots);
            task.state = State::Decoding;
            engine.wants_step(context, at);
        }
        ToEngine::PagesDropped { handle } => {
            let epoch = engine.epoch;
            let pages = engine.pool.dropping.remove(&handle).unwrap_or_default();
            engine.pool.free.extend(&pages);
            // It uses them for something else.
            for page in pages {
                node.write_pool(epoch, page, 0, &UNWRITTEN);
            }
        }
        ToEngine::Got { handle, keys, slots } => got(node, context, (epoch, handle), &keys, &slots),
    }
}

/// The pages of a decode share are there.
fn ready(
    node: &mut Running,
    context: &mut Context,
    (epoch, share): (AttachEpoch, Share),
    tail: &[u8],
) {
    let at = node.at;
    let Some(engine) = node.engine_mut(epoch) else { return };
    let Some(task) = engine.tasks.get_mut(&share) else { return };
    let first = tail.try_into().map(u32::from_le_bytes).unwrap_or(0);
    task.answer.push(first);
    task.tokens.push(first);
    task.cached_pages = (task.prompt_tokens as u32) / BLOCK_TOKENS;
    task.state = State::Decoding;
    engine.wants_step(context, at);
}

/// Blocks that it asked for and holds now.
fn got(
    node: &mut Running,
    context: &mut Context,
    (epoch, handle): (AttachEpoch, u64),
    keys: &[BlockKey],
    slots: &[SlotIndex],
) {
    let at = node.at;
    for (key, slot) in keys.iter().zip(slots) {
        let bytes = node.read_slot(*slot);
        let share = Share {
            tx: kvasir_proto::TxId { conductor_incarnation: 0, serial: handle },
            side: Side::Decode,
        };
        context.see(Seen::PageRead { at, share, key: *key, bytes });
    }
    let Some(engine) = node.engine_mut(epoch) else { return };
    if slots.is_empty() {
        return;
    }
    if context.chance("unpin", at.node as u64, handle).percent(70) {
        return engine.say(context, at, FromEngine::Unpin { handle });
    }
    engine.handles.insert(handle);
    engine.wants_step(context, at);
}

/// A step: each of its tasks goes on by a layer or a token.
pub fn step(node: &mut Running, context: &mut Context, epoch: AttachEpoch) {
    let at = node.at;
    let Some(engine) = node.engine_mut(epoch) else { return };
    if engine.step_at_us.is_none_or(|step_us| step_us > context.now_us) {
        // It was put off, or another one came before it.
        return;
    }
    engine.step_at_us = None;
    if engine.expelled {
        // Its connection is closed: it ends.
        return node.kill_engine(context, epoch);
    }
    engine.step += 1;
    engine.progress = Some(Progress { step: engine.step, layers_done: 0 });
    let shares: Vec<Share> = engine.tasks.keys().copied().collect();
    for share in shares {
        advance(node, context, (epoch, share));
    }
    let Some(engine) = node.engine_mut(epoch) else { return };
    let next_us = engine.tasks.values().filter_map(|task| match task.state {
        State::Prefilling { .. } => Some(0),
        State::Decoding => Some(task.next_token_us),
        State::Binding | State::WaitsForPages | State::Growing => None,
    });
    match next_us.min() {
        Some(next_us) if next_us > context.now_us => engine.steps_at(context, at, next_us),
        Some(_) => engine.wants_step(context, at),
        None => {}
    }
    if context.now_us >= engine.alive_us && !engine.tasks.is_empty() {
        engine.alive_us = context.now_us + ALIVE_US;
        // From the hand-over on the decode side keeps its own lease.
        let decoding = engine.tasks.iter().filter(|(_, task)| !task.answer.is_empty());
        let shares = decoding.map(|(share, _)| *share).collect();
        engine.say(context, at, FromEngine::Alive { shares });
    }
    if engine.tasks.is_empty() {
        // It holds nothing while it has nothing to do.
        for handle in std::mem::take(&mut engine.handles) {
            engine.say(context, at, FromEngine::Unpin { handle });
        }
    } else if context.chance("look up", at.node as u64, 0).percent(2) {
        look_something_up(node, context, epoch);
    }
}

/// A lookup that belongs to no share.
fn look_something_up(node: &mut Running, context: &mut Context, epoch: AttachEpoch) {
    let at = node.at;
    let mut random = context.chance("looked up", at.node as u64, 0);
    let handle = random.draw() % HANDLES_MAX;
    let request = random.below(context.truth.requests.len());
    let keys = context.truth.requests[request].keys.clone();
    let Some(engine) = node.engine_mut(epoch) else { return };
    match engine.handles.remove(&handle) {
        true => engine.say(context, at, FromEngine::Unpin { handle }),
        false => engine.say(context, at, FromEngine::Get { handle, keys }),
    }
}

fn advance(node: &mut Running, context: &mut Context, (epoch, share): (AttachEpoch, Share)) {
    let Some(engine) = node.engine_mut(epoch) else { return };
    let Some(task) = engine.tasks.get_mut(&share) else { return };
    match &task.state {
        State::Prefilling { .. } => prefill(node, context, (epoch, share)),
        State::Decoding => decode(node, context, (epoch, share)),
        State::Binding | State::WaitsForPages | State::Growing => {}
    }
}

fn prefill(node: &mut Running, context: &mut Context, (epoch, share): (AttachEpoch, Share)) {
    let at = node.at;
    let Some(engine) = node.engine_mut(epoch) else { return };
    let step = engine.step;
    let Some(task) = engine.tasks.get_mut(&share) else { return };
    let State::Prefilling { pages, rows, layers } = &mut task.state else { return };
    if !rows.is_empty() && usize::from(*layers) < LAYERS {
        let layer = *layers;
        *layers += 1;
        engine.progress = Some(Progress { step, layers_done: layer + 1 });
        let writes: Vec<(SlotIndex, Option<u32>, PageBytes)> = pages
            .clone()
            .zip(rows.iter())
            .map(|(page, rows)| {
                (task.slots[page as usize], task.in_pool.get(&page).copied(), *rows)
            })
            .collect();
        let (in_pool, epoch) = (task.in_pool.contains_key(&pages.start), engine.epoch);
        let message = FromEngine::Finished { share, step, pages: pages.clone(), layer, in_pool };
        let layer_bytes = SLOT_BYTES / LAYERS;
        let start = usize::from(layer) * layer_bytes;
        for (slot, in_pool, rows) in writes {
            let layer = &rows[start..start + layer_bytes];
            match in_pool {
                Some(page) => node.write_pool(epoch, page, start, layer),
                None => node.write_slot(slot, start, layer),
            }
        }
        if let Some(engine) = node.engine_mut(epoch) {
            engine.say(context, at, message);
        }
        return;
    }
    // The next chunk, or the end.
    let (first, tokens, cached_pages) = (pages.end, task.tokens.clone(), task.cached_pages);
    let (places, request) = (Places::of(epoch, task), task.leg.request);
    let count = (task.prompt_tokens as u32).div_ceil(BLOCK_TOKENS);
    if first == count {
        return prompt_done(node, context, (epoch, share));
    }
    let last = count.min(first + CHUNK_PAGES);
    let mut before = read_pages(node, context, share, request, &places, cached_pages, first);
    let rows = (first..last).map(|page| {
        before = content::page(&before, page_tokens(&tokens, page));
        before
    });
    let rows: Vec<PageBytes> = rows.collect();
    let Some(engine) = node.engine_mut(epoch) else { return };
    if let Some(task) = engine.tasks.get_mut(&share) {
        let wanted = (last - first) as usize;
        // Who goes on to answer does so in the slots; and so does every prompt for which there are no pages.
        if !task.leg.answers && engine.pool.free.len() >= wanted {
            let pages: Vec<u32> = engine.pool.free.drain(..wanted).collect();
            task.in_pool.extend((first..last).zip(pages.iter().copied()));
            engine.say(context, at, FromEngine::Compute { share, step, first, pages });
        }
    }
    if let Some(task) = engine.tasks.get_mut(&share) {
        task.state = State::Prefilling { pages: first..last, rows, layers: 0 };
    }
}

fn page_tokens(tokens: &[u32], page: u32) -> &[u32] {
    let start = (page * BLOCK_TOKENS) as usize;
    &tokens[start..tokens.len().min(start + BLOCK_TOKENS as usize)]
}

/// Where the pages of a task are.
struct Places {
    epoch: AttachEpoch,
    slots: Vec<SlotIndex>,
    in_pool: BTreeMap<u32, u32>,
}

impl Places {
    fn of(epoch: AttachEpoch, task: &Task) -> Self {
        Places { epoch, slots: task.slots.clone(), in_pool: task.in_pool.clone() }
    }

    fn read(&self, node: &Running, page: u32) -> PageBytes {
        match self.in_pool.get(&page) {
            Some(page) => node.read_pool(self.epoch, *page),
            None => node.read_slot(self.slots[page as usize]),
        }
    }
}

/// Reads all pages before `page`, as attention does; answers with the last one.
fn read_pages(
    node: &Running,
    context: &mut Context,
    share: Share,
    request: usize,
    places: &Places,
    cached_pages: u32,
    page: u32,
) -> PageBytes {
    let mut last = content::root(context.plan.requests[request].namespace());
    for at in 0..page.max(cached_pages).min(places.slots.len() as u32) {
        let bytes = places.read(node, at);
        let key = context.truth.requests[request].keys.get(at as usize).copied();
        if let Some(key) = key.filter(|_| at < cached_pages) {
            context.see(Seen::PageRead { at: node.at, share, key, bytes });
        }
        if at + 1 == page {
            last = bytes;
        }
    }
    last
}

/// The prompt is computed: the first token follows from its last page.
fn prompt_done(node: &mut Running, context: &mut Context, (epoch, share): (AttachEpoch, Share)) {
    let at = node.at;
    let Some(engine) = node.engine_mut(epoch) else { return };
    let Some(task) = engine.tasks.get(&share) else { return };
    let last = task.slots.len() as u32 - 1;
    let token = content::next_token(&Places::of(epoch, task).read(node, last));
    let Some(engine) = node.engine_mut(epoch) else { return };
    let Some(task) = engine.tasks.get_mut(&share) else { return };
    if task.leg.answers {
        task.answer.push(token);
        task.tokens.push(token);
        task.cached_pages = task.cached_pages.max((task.prompt_tokens as u32) / BLOCK_TOKENS);
        task.state = State::Decoding;
        return;
    }
    let tail = token.to_le_bytes().to_vec();
    engine.say(context, at, FromEngine::FinishPrefill { share, tail });
    engine.let_go(context, at, share);
}

/// One token: its rows are written, and the next one follows.
fn decode(node: &mut Running, context: &mut Context, (epoch, share): (AttachEpoch, Share)) {
    let at = node.at;
    let Some(engine) = node.engine_mut(epoch) else { return };
    let Some(task) = engine.tasks.get_mut(&share) else { return };
    let request = task.leg.request;
    if context.now_us < task.next_token_us {
        return;
    }
    task.next_token_us = context.now_us + context.plan.requests[request].token_us;
    if task.answer.len() >= context.plan.requests[request].generated_tokens as usize {
        let (to, tokens) = (task.leg.reply, task.answer.clone());
        context.see(Seen::Answered { request, tokens: tokens.clone() });
        context.send(&Event::Reply { to, reply: Reply::Answered { tokens } });
        return engine.let_go(context, at, share);
    }
    // The last token's rows go into this page.
    let page = (task.tokens.len() as u32 - 1) / BLOCK_TOKENS;
    if page as usize >= task.slots.len() {
        task.state = State::Growing;
        return engine.say(context, at, FromEngine::Grow { share, pages: 1 });
    }
    let (places, tokens) = (Places::of(epoch, task), task.tokens.clone());
    let cached_pages = task.cached_pages.min(page);
    let before = read_pages(node, context, share, request, &places, cached_pages, page);
    let rows = content::page(&before, page_tokens(&tokens, page));
    node.write_slot(places.slots[page as usize], 0, &rows);
    let Some(engine) = node.engine_mut(epoch) else { return };
    if tokens.len() as u32 == (page + 1) * BLOCK_TOKENS {
        let namespace = context.plan.requests[request].namespace();
        let key = keys::chain(namespace, &tokens, BLOCK_TOKENS as usize)[page as usize];
        engine.say(context, at, FromEngine::Commit { share, page, key });
    }
    let token = content::next_token(&rows);
    if let Some(task) = engine.tasks.get_mut(&share) {
        task.answer.push(token);
        task.tokens.push(token);
    }
}
