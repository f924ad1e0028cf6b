//! The balance of every model of a view: samples the loads of its instances, and plans for those that can
//! do both. It books nothing and changes nothing; that a role has changed it sees in the view, whoever has
//! changed it, so that any number of conductors come to rest together.
//!
//! The load of an instance that prefills is 1 while it is busy and 0 while it is not, and on top of that what a
//! prompt that comes now would wait, over the objective: the wait alone says nothing until a side is full. The
//! load of one that decodes is what is used of the room between the time between tokens when it is idle
//! and its objective, of its places, or of its slots, whichever is most: what a step takes at least is
//! there however many share the work. What was refused for a side's sake counts as load of that side.

use std::collections::BTreeMap;

use super::{Balance, BalanceOptions, Member, RatioPlan};
use crate::cost::DecodeLoad;
use crate::decision::{Objectives, OverloadReason};
use crate::view::{ClusterView, Instance, InstanceRef, ModelIndex, Role};

/// A side for whose sake so many are refused is full, whatever it looks like: requests are let in when they are
/// likely in time, and not until the mean is at its objective. Picked on the first half of the conversations.
const FULL_SHARE: f64 = 0.05;
/// What is refused raises a load by this at most.
const REFUSED_MAX: f64 = 10.0;

/// See [`Roles`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RolesOptions {
    pub balance: BalanceOptions,
    /// What loads are held against.
    pub objectives: Objectives,
    /// How long an instance keeps a role.
    pub dwell_us: u64,
}

/// What is known of one model.
#[derive(Debug, Clone)]
struct Watched {
    balance: Balance,
    /// What each plays, and when it was seen to have changed to that.
    played: BTreeMap<InstanceRef, (Role, Option<u64>)>,
    loads: Loads,
    decided: Decided,
}

/// The mean load of each side, as it was sampled last.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Loads {
    pub prefill: f64,
    pub decode: f64,
}

/// Decisions of the last window or so: they fade.
#[derive(Debug, Clone, Copy, Default)]
struct Decided {
    all: f64,
    for_prefill: f64,
    for_decode: f64,
    faded_us: u64,
}

/// See the module. Call [`Self::decided`] for each decision, [`Self::sample`] now and then, and [`Self::plan`]
/// after it. Samples are best taken at uneven times: requests that come in step with them would make a side
/// look busier, or idler, than it is.
#[derive(Debug, Clone)]
pub struct Roles {
    options: RolesOptions,
    models: BTreeMap<ModelIndex, Watched>,
}

impl Roles {
    pub fn new(options: RolesOptions) -> Self {
        Roles { options, models: BTreeMap::new() }
    }

    /// A request was placed, or refused for this reason.
    pub fn decided(&mut self, model: ModelIndex, refused: Option<OverloadReason>) {
        let Some(Watched { decided, .. }) = self.models.get_mut(&model) else { return };
        decided.all += 1.0;
        match refused {
            None => {}
            Some(OverloadReason::Ttft) => decided.for_prefill += 1.0,
            Some(OverloadReason::Tbt | OverloadReason::NoRoom) => decided.for_decode += 1.0,
        }
    }

    /// The loads as they are now.
    pub fn sample(&mut self, view: &ClusterView, now_us: u64) {
        self.models.retain(|model, _| view.instances().iter().any(|i| i.model() == *model));
        for (model, _) in view.models() {
            if !view.instances().iter().any(|i| i.model() == model) {
                continue;
            }
            let options = self.options;
            let watched = self.models.entry(model).or_insert_with(|| Watched {
                balance: Balance::new(options.balance),
                played: BTreeMap::new(),
                loads: Loads::default(),
                decided: Decided::default(),
            });
            watched.see_roles(view, model, now_us);
            watched.loads = loads(view, model, &options.objectives, now_us);
            watched.decided.fade(options.balance.window_us, now_us);
            watched.loads.count(watched.decided);
            watched.balance.sample(now_us, watched.loads.prefill, watched.loads.decode);
        }
    }

    /// Somebody was asked to change a role of this model, with whatever outcome: a whole window is seen before
    /// anybody is asked again.
    pub fn asked(&mut self, model: ModelIndex, now_us: u64) {
        if let Some(watched) = self.models.get_mut(&model) {
            watched.balance.changed(now_us);
        }
    }

    /// What each side had to do at the last sample.
    pub fn loads(&self, model: ModelIndex) -> Option<Loads> {
        Some(self.models.get(&model)?.loads)
    }

    /// What would be better, and what to do now. Nothing is to be done while an instance still ends what it
    /// did in its former role.
    pub fn plan(&self, view: &ClusterView, now_us: u64) -> Vec<(ModelIndex, RatioPlan)> {
        let plan = |(model, watched): (&ModelIndex, &Watched)| {
            let of_model = || view.instances().iter().filter(|i| i.model() == *model);
            let member = |instance: &Instance| watched.member(instance, &self.options, now_us);
            let members: Vec<Member> = of_model().map(member).collect();
            let mut plan = watched.balance.plan(&members, now_us)?;
            if of_model().filter(ends_former).count()
                >= self.options.balance.concurrent_role_changes_max
            {
                plan.changes.clear();
            }
            Some((*model, plan))
        };
        self.models.iter().filter_map(plan).collect()
    }
}

impl Watched {
    /// What was sampled says nothing any more when others play, or the same ones other roles.
    fn see_roles(&mut self, view: &ClusterView, model: ModelIndex, now_us: u64) {
        let of_model = view.instances().iter().filter(|i| i.model() == model);
        let known = &self.played;
        let seen = |instance: &Instance| {
            let (of, plays) = (instance.reference(), instance.report().playing());
            let since_us = match known.get(&of) {
                Some((role, since_us)) if *role == plays => *since_us,
                Some(_) => Some(now_us),
                None => None,
            };
            (of, (plays, since_us))
        };
        let played: BTreeMap<_, _> = of_model.map(seen).collect();
        let roles = |played: &BTreeMap<InstanceRef, (Role, Option<u64>)>| {
            played.iter().map(|(of, (role, _))| (*of, *role)).collect::<Vec<_>>()
        };
        if !known.is_empty() && roles(known) != roles(&played) {
            self.balance.changed(now_us);
            self.decided = Decided { faded_us: now_us, ..Decided::default() };
        }
        self.played = played;
    }

    fn member(&self, instance: &Instance, options: &RolesOptions, now_us: u64) -> Member {
        let (report, of) = (instance.report(), instance.reference());
        let since_us = self.played.get(&of).and_then(|(_, since_us)| *since_us);
        let has_dwelt = since_us.is_none_or(|us| now_us.saturating_sub(us) >= options.dwell_us);
        Member {
            instance: of,
            role: report.playing(),
            can_change: report.role == Role::Both && !report.draining && has_dwelt,
            // By its own word, which all conductors hear: they choose alike.
            open_work: (report.load.running + report.load.waiting) as usize,
        }
    }
}

impl Decided {
    fn fade(&mut self, window_us: u64, now_us: u64) {
        let windows = now_us.saturating_sub(self.faded_us) as f64 / window_us.max(1) as f64;
        let left = (-windows).exp();
        for count in [&mut self.all, &mut self.for_prefill, &mut self.for_decode] {
            *count *= left;
        }
        self.faded_us = now_us;
    }
}

impl Loads {
    fn count(&mut self, decided: Decided) {
        let raised = |load: f64, refused: f64| {
            let share = if decided.all > 0.0 { refused / decided.all } else { 0.0 };
            load.max((share / FULL_SHARE).min(1.0)) / (1.0 - share).max(1.0 / REFUSED_MAX)
        };
        self.prefill = raised(self.prefill, decided.for_prefill);
        self.decode = raised(self.decode, decided.for_decode);
    }
}

fn loads(view: &ClusterView, model: ModelIndex, objectives: &Objectives, now_us: u64) -> Loads {
    let of_model =
        || view.instances().iter().filter(|i| i.model() == model && !i.report().draining);
    let mean = |does: fn(Role) -> bool, load: &dyn Fn(&Instance) -> f64| {
        let takes = || of_model().filter(|i| does(i.role()));
        takes().map(load).sum::<f64>() / takes().count().max(1) as f64
    };
    Loads {
        prefill: mean(Role::prefills, &|i| prefill_load(i, objectives, now_us)),
        decode: mean(Role::decodes, &|i| decode_load(view, i, objectives, now_us)),
    }
}

fn prefill_load(instance: &Instance, objectives: &Objectives, now_us: u64) -> f64 {
    let queue_us = instance.queue_us(u64::MAX, now_us);
    f64::from(u8::from(instance.has_prefills())) + queue_us as f64 / objectives.ttft_us as f64
}

fn decode_load(
    view: &ClusterView,
    instance: &Instance,
    objectives: &Objectives,
    now_us: u64,
) -> f64 {
    let report = instance.report();
    let answers = instance.answers_at(now_us, now_us);
    if answers == 0.0 {
        return 0.0;
    }
    let places = answers / f64::from(report.running_requests_max.max(1));
    let slots_taken = report.slots_total.saturating_sub(view.slots_left(instance));
    let slots = f64::from(slots_taken) / f64::from(report.slots_total.max(1));
    let alone = DecodeLoad { running: 1.0, joining: 0.0, prompt_tokens: 0.0 };
    let alone_us = instance.predict_tbt_us(alone) as f64;
    let now = instance.decode_load(view.policy().admission, 0, now_us, now_us);
    // Where an idle one hardly meets the objective there is still a difference between idle and busy.
    let objective_us = objectives.tbt_us as f64;
    let room_us = (objective_us - alone_us).max(objective_us / 10.0).max(1.0);
    let tbt = (instance.predict_tbt_us(now) as f64 - alone_us) / room_us;
    places.max(slots).max(tbt)
}

/// It has work of a role that it does not play any more.
fn ends_former(instance: &&Instance) -> bool {
    match instance.report().playing() {
        Role::Prefill => instance.has_answers(),
        Role::Decode => instance.has_prompts(),
        Role::Both => false,
    }
}
