//! An engine that does what a test says, through the client that real engines link.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use kvasir_attach::{AttachError, AttachOptions, EngineAttachment};
use kvasir_proto::{Share, SlotLayout, v1};
use v1::engine_to_node::Message as ToNode;
use v1::node_to_engine::Message as FromNode;

use super::{LAYERS, PATIENCE, TestNode, layout, page_bytes};

pub(crate) struct FakeEngine {
    pub attachment: EngineAttachment,
    layout: SlotLayout,
    step: u32,
    seen: VecDeque<FromNode>,
}

pub(crate) fn engine_options(attach_dir: &Path, layout: SlotLayout) -> AttachOptions {
    AttachOptions {
        attach_dir: attach_dir.into(),
        instance_id: "engine".into(),
        instance_type: "a-type".into(),
        role: v1::Role::Both,
        model: v1::ModelDescription {
            name: "model".into(),
            fingerprint: b"model".to_vec(),
            kv_dtype: "f32".into(),
            vocab_size: 1000,
            context_tokens: 4096,
            routed: None,
        },
        layout,
        engine_address: "127.0.0.1:1".into(),
        running_requests_max: 4,
        pool: None,
    }
}

impl FakeEngine {
    pub(crate) async fn attach(node: &TestNode) -> Self {
        let attachment =
            EngineAttachment::connect(engine_options(&node.attach_dir(), layout())).await;
        FakeEngine::new(attachment.expect("attached"))
    }

    pub(crate) async fn try_attach(
        node: &TestNode,
        layout: SlotLayout,
    ) -> Result<Self, AttachError> {
        let options = engine_options(&node.attach_dir(), layout);
        EngineAttachment::connect(options).await.map(FakeEngine::new)
    }

    /// One of several on a node.
    pub(crate) async fn attach_as(node: &TestNode, name: &str) -> Self {
        FakeEngine::try_attach_as(node, name, |_| {}).await.expect("attached")
    }

    pub(crate) async fn try_attach_as(
        node: &TestNode,
        name: &str,
        change: impl FnOnce(&mut AttachOptions),
    ) -> Result<Self, AttachError> {
        let mut options = engine_options(&node.attach_dir(), layout());
        options.instance_id = name.into();
        change(&mut options);
        EngineAttachment::connect(options).await.map(FakeEngine::new)
    }

    pub(crate) fn new(attachment: EngineAttachment) -> Self {
        FakeEngine { attachment, layout: layout(), step: 0, seen: VecDeque::new() }
    }

    pub(crate) fn send(&mut self, message: ToNode) {
        self.attachment.send(message).expect("sent");
    }

    /// Waits for the first message that `wanted` takes; keeps the others for later.
    pub(crate) async fn wait<T>(
        &mut self,
        what: &str,
        wanted: impl Fn(&FromNode) -> Option<T>,
    ) -> T {
        let started = Instant::now();
        loop {
            while let Some(message) = self.attachment.try_recv().expect("attached") {
                self.seen.push_back(message);
            }
            if let Some(at) = self.seen.iter().position(|message| wanted(message).is_some()) {
                let message = self.seen.remove(at).expect("it was there");
                return wanted(&message).expect("it was wanted");
            }
            assert!(started.elapsed() < PATIENCE, "not in time: {what}; seen {:?}", self.seen);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Everything received so far that is not asked for yet.
    pub(crate) fn unasked(&mut self) -> Vec<FromNode> {
        while let Some(message) = self.attachment.try_recv().expect("attached") {
            self.seen.push_back(message);
        }
        self.seen.drain(..).collect()
    }

    pub(crate) fn ask_bind(&mut self, share: Share) {
        self.send(ToNode::Bind(v1::Bind { tx: Some(share.tx.into()), side: share.side.to_wire() }));
    }

    pub(crate) async fn bound(&mut self, share: Share) -> v1::Bound {
        self.wait("bound", |message| match message {
            FromNode::Bound(bound)
                if bound.tx == Some(share.tx.into()) && bound.side == share.side.to_wire() =>
            {
                Some(bound.clone())
            }
            _ => None,
        })
        .await
    }

    pub(crate) async fn bind(&mut self, share: Share) -> v1::Bound {
        self.ask_bind(share);
        let bound = self.bound(share).await;
        assert_eq!(bound.status(), v1::BindStatus::Ok, "{share}");
        bound
    }

    pub(crate) async fn ready(&mut self, share: Share) -> Vec<u8> {
        self.wait("ready", |message| match message {
            FromNode::Ready(ready) if ready.tx == Some(share.tx.into()) => Some(ready.tail.clone()),
            _ => None,
        })
        .await
    }

    pub(crate) async fn got(&mut self, handle: u64) -> v1::GotBlocks {
        self.wait("got", |message| match message {
            FromNode::Got(got) if got.handle == handle => Some(got.clone()),
            _ => None,
        })
        .await
    }

    pub(crate) async fn stopped(&mut self, share: Share) -> String {
        self.wait("stop", |message| match message {
            FromNode::Stop(stop)
                if stop.tx == Some(share.tx.into()) && stop.side == share.side.to_wire() =>
            {
                Some(stop.reason.clone())
            }
            _ => None,
        })
        .await
    }

    pub(crate) async fn grow(&mut self, share: Share, page_count: u32) -> Vec<u32> {
        let (tx, side) = (Some(share.tx.into()), share.side.to_wire());
        self.send(ToNode::Grow(v1::Grow { tx, side, page_count }));
        self.wait("grown", |message| match message {
            FromNode::Grown(grown) if grown.tx == tx => Some(grown.slots.clone()),
            _ => None,
        })
        .await
    }

    /// Announces a step that finishes these pages; answers with its number.
    pub(crate) fn plan(&mut self, shares: &[(Share, std::ops::Range<u32>)]) -> u32 {
        self.step += 1;
        let pages = shares
            .iter()
            .map(|(share, pages)| v1::StepPages {
                tx: Some(share.tx.into()),
                side: share.side.to_wire(),
                first_page: pages.start,
                page_count: pages.len() as u32,
                pool_pages: Vec::new(),
            })
            .collect();
        self.send(ToNode::Plan(v1::StepPlan { step: self.step, pages }));
        self.step
    }

    /// The same of pages that are computed in the engine's pool, from these pages of it on.
    pub(crate) fn plan_in_pool(&mut self, shares: &[(Share, std::ops::Range<u32>, u32)]) -> u32 {
        self.step += 1;
        let pages = shares
            .iter()
            .map(|(share, pages, first)| v1::StepPages {
                tx: Some(share.tx.into()),
                side: share.side.to_wire(),
                first_page: pages.start,
                page_count: pages.len() as u32,
                pool_pages: (*first..).take(pages.len()).collect(),
            })
            .collect();
        self.send(ToNode::Plan(v1::StepPlan { step: self.step, pages }));
        self.step
    }

    pub(crate) fn write(&self, slot: u32, layer: u16, bytes: &[u8]) {
        let run = self.layout.runs(layer.into())[0];
        let offset = u64::from(slot) * self.layout.slot_bytes() + run.offset_bytes;
        let written = self.attachment.slot_memory().copy_from(offset as usize, bytes);
        written.expect("inside the slot");
    }

    pub(crate) fn read(&self, slot: u32, layer: u16) -> Vec<u8> {
        let run = self.layout.runs(layer.into())[0];
        let offset = u64::from(slot) * self.layout.slot_bytes() + run.offset_bytes;
        let mut bytes = vec![0; run.length_bytes as usize];
        let read = self.attachment.slot_memory().copy_to(offset as usize, &mut bytes);
        read.expect("inside the slot");
        bytes
    }

    /// Computes pages of one prompt in one step, layer by layer.
    pub(crate) fn compute(
        &mut self,
        share: Share,
        prompt: &[u32],
        slots: &[u32],
        pages: std::ops::Range<u32>,
    ) {
        let step = self.plan(&[(share, pages.clone())]);
        for layer in 0..LAYERS {
            for page in pages.clone() {
                self.write(slots[page as usize], layer, &page_bytes(prompt, page, layer));
            }
            self.attachment.progress(step, layer + 1);
        }
    }

    pub(crate) fn finish(&mut self, share: Share, tail: &[u8]) {
        let tx = Some(share.tx.into());
        self.send(ToNode::FinishPrefill(v1::FinishPrefill { tx, tail: tail.to_vec() }));
    }

    pub(crate) fn release(&mut self, share: Share) {
        let (tx, side) = (Some(share.tx.into()), share.side.to_wire());
        self.send(ToNode::Release(v1::Release { tx, side }));
    }

    /// Asserts that these slots hold these pages of the prompt, byte for byte.
    pub(crate) fn holds(&self, prompt: &[u32], slots: &[u32], pages: std::ops::Range<u32>) {
        for page in pages {
            for layer in 0..LAYERS {
                let bytes = self.read(slots[page as usize], layer);
                assert!(bytes == page_bytes(prompt, page, layer), "page {page} layer {layer}");
            }
        }
    }
}
