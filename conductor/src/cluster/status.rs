//! One status of a node, read from the wire and checked: outside input gives errors, never panics.

use std::sync::Arc;

use kvasir_placement::{
    InstanceReport, ModelSpec, NodeIndex, ReportedLoad, Role, RoutedRows, SsdReads,
};
use kvasir_proto::{FieldError, InstanceId, LayoutError, NodeId, SlotLayout, v1};

/// Why a status cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum StatusError {
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error("the node reports an invalid block layout")]
    Layout(#[from] LayoutError),
    #[error("the node now reports the id `{got}`; it was `{was}`")]
    Renamed { got: String, was: NodeId },
    #[error("two instances of the node have the id `{0}`; give each engine its own `instance_id`")]
    SameInstance(InstanceId),
    #[error("`{0}` is not the address of an engine")]
    EngineAddress(String),
}

/// An engine that is attached, as the view wants it, and where it answers.
pub(super) struct Attached {
    pub(super) report: InstanceReport,
    pub(super) engine_address: String,
    pub(super) attach_epoch: u32,
    pub(super) role_version: u64,
}

/// Reads the engines of a status.
pub(super) fn attached(
    status: &v1::NodeDescription,
    node: NodeIndex,
) -> Result<Vec<Attached>, StatusError> {
    if status.instances.is_empty() {
        return Ok(Vec::new());
    }
    let layout = status.layout.as_ref().ok_or(FieldError::Missing("layout"))?;
    let layout = SlotLayout::try_from(layout)?;
    let one = |instance| attached_one((status, &layout), node, instance);
    status.instances.iter().map(one).collect()
}

fn attached_one(
    (status, layout): (&v1::NodeDescription, &SlotLayout),
    node: NodeIndex,
    attached: &v1::AttachedInstance,
) -> Result<Attached, StatusError> {
    let instance = attached.description.as_ref().ok_or(FieldError::Missing("description"))?;
    let model = instance.model.as_ref().ok_or(FieldError::Missing("model"))?;
    let load = attached.load.unwrap_or_default();
    let report = InstanceReport {
        instance_id: InstanceId::from(instance.instance_id.as_str()),
        instance_type: instance.instance_type.as_str().into(),
        node,
        node_id: NodeId::from(status.node_id.as_str()),
        attachment: (status.incarnation, instance.attach_epoch),
        role: role(instance.role)?,
        current_role: match instance.current_role {
            0 => None,
            current => Some(role(current)?),
        },
        model: model_spec(model, layout)?,
        running_requests_max: instance.running_requests_max,
        slots_total: status.slots_total,
        slots_available: status.slots_available,
        ssd_reads: status.ssd.as_ref().map_or_else(SsdReads::default, |ssd| SsdReads {
            bytes_total: ssd.read_bytes_total,
            us_total: ssd.read_us_total,
        }),
        draining: status.draining,
        load: ReportedLoad {
            running: load.running_requests,
            waiting: load.waiting_requests,
            waiting_prompt_tokens: load.waiting_prompt_tokens,
        },
    };
    let engine_address = instance.engine_address.clone();
    let (attach_epoch, role_version) = (instance.attach_epoch, instance.role_version);
    Ok(Attached { report, engine_address, attach_epoch, role_version })
}

fn role(role: i32) -> Result<Role, FieldError> {
    match v1::Role::try_from(role) {
        Ok(v1::Role::Prefill) => Ok(Role::Prefill),
        Ok(v1::Role::Decode) => Ok(Role::Decode),
        Ok(v1::Role::Both) => Ok(Role::Both),
        Ok(v1::Role::Unspecified) | Err(_) => Err(FieldError::Unknown { field: "role", got: role }),
    }
}

fn model_spec(model: &v1::ModelDescription, layout: &SlotLayout) -> Result<ModelSpec, FieldError> {
    let got = model.fingerprint.len();
    let fingerprint = model.fingerprint.as_slice().try_into().map_err(|_| FieldError::Length {
        field: "fingerprint",
        got,
        want: "32",
    })?;
    Ok(ModelSpec {
        name: Arc::from(model.name.as_str()),
        fingerprint,
        kv_dtype: Arc::from(model.kv_dtype.as_str()),
        vocab_size: model.vocab_size,
        context_tokens: model.context_tokens,
        block_tokens: layout.block_tokens(),
        block_bytes: layout.slot_bytes(),
        layout_hash: layout_hash(layout),
        routed: model.routed.map(|rows| RoutedRows {
            heads: rows.heads,
            query_bytes: rows.query_bytes,
            partial_bytes: rows.partial_bytes,
            layers: layout.layers() as u32,
        }),
    })
}

/// FNV-1a over every number of the layout. Equal layouts have equal hashes; the nodes compare the
/// layouts themselves before a byte moves.
fn layout_hash(layout: &SlotLayout) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut mix = |number: u64| hash = (hash ^ number).wrapping_mul(0x0100_0000_01b3);
    mix(layout.block_tokens().into());
    mix(layout.slot_bytes());
    for layer in 0..layout.layers() {
        mix(u64::MAX);
        for run in layout.runs(layer) {
            mix(run.offset_bytes);
            mix(run.length_bytes);
        }
    }
    hash
}
