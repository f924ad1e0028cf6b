//! How values of other modules are written. Floating-point numbers are text, since readers of JSON may be off
//! by their last bit; text in Rust's shortest form comes back as it was.

use serde::{Deserialize, Serialize};

use crate::attend::{
    Congestion, Constants, FabricProfile, GatherProfile, KernelProfile, MergeProfile,
    SelectedProfile, SpliceProfile,
};
use crate::cost::{LearnedDecode, LinkProfile, PrefillProfile, SsdProfile};
use crate::decision::{Admission, Policy};
use crate::routing::Routing;
use crate::selection::Selection;

/// A number as text.
pub(super) mod exact {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{value:?}"))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|_| D::Error::custom(format_args!("{text:?} is not a number")))
    }
}

/// Numbers as texts.
pub(super) mod exacts {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer, const N: usize>(
        values: &[f64; N],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(|value| format!("{value:?}")))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>, const N: usize>(
        deserializer: D,
    ) -> Result<[f64; N], D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        let values: Result<Vec<f64>, _> = texts.iter().map(|text| text.parse()).collect();
        let values = values.map_err(|_| D::Error::custom("a text is not a number"))?;
        let wrong = |values: Vec<f64>| {
            D::Error::custom(format_args!("got {} numbers, expected {N}", values.len()))
        };
        values.try_into().map_err(wrong)
    }
}

/// Shared text.
pub(super) mod text {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(
        value: &Arc<str>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(value)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<str>, D::Error> {
        String::deserialize(deserializer).map(Arc::from)
    }
}

mod routing {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::RoutingForm;
    use crate::routing::Routing;

    #[derive(Serialize, Deserialize)]
    struct Written(#[serde(with = "RoutingForm")] Routing);

    pub(super) fn serialize<S: Serializer>(
        value: &Option<Routing>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.map(Written).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Routing>, D::Error> {
        Ok(Option::<Written>::deserialize(deserializer)?.map(|Written(routing)| routing))
    }
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Policy", deny_unknown_fields)]
pub(super) struct PolicyForm {
    admission: Admission,
    selection: Selection,
    #[serde(with = "exact")]
    kvcache_balancing_threshold: f64,
    always_fetch: bool,
    #[serde(with = "exact")]
    shortest_prefill_first_factor: f64,
    #[serde(with = "exact")]
    decode_load_margin: f64,
    #[serde(with = "routing")]
    routing: Option<Routing>,
    retry_after_ms_min: u64,
    retry_after_ms_max: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Routing", deny_unknown_fields)]
struct RoutingForm {
    #[serde(with = "ConstantsForm")]
    constants: Constants,
    always: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Constants", deny_unknown_fields)]
struct ConstantsForm {
    #[serde(with = "FabricForm")]
    fabric: FabricProfile,
    #[serde(with = "KernelForm")]
    holder: KernelProfile,
    #[serde(with = "KernelForm")]
    local: KernelProfile,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "FabricProfile", deny_unknown_fields)]
struct FabricForm {
    #[serde(with = "exact")]
    probe_us: f64,
    #[serde(with = "exact")]
    turnaround_us: f64,
    #[serde(with = "exact")]
    bytes_per_us: f64,
    #[serde(with = "CongestionForm")]
    congestion: Congestion,
    concurrent_messages_max: u32,
    #[serde(with = "SpliceForm")]
    splice: SpliceProfile,
    #[serde(with = "GatherForm")]
    gather: GatherProfile,
    #[serde(with = "MergeForm")]
    merge: MergeProfile,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Congestion", deny_unknown_fields)]
struct CongestionForm {
    flat_messages: u32,
    #[serde(with = "exact")]
    message_factor: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "SpliceProfile", deny_unknown_fields)]
struct SpliceForm {
    #[serde(with = "exact")]
    base_us: f64,
    #[serde(with = "exact")]
    token_us: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "GatherProfile", deny_unknown_fields)]
struct GatherForm {
    #[serde(with = "exact")]
    base_us: f64,
    #[serde(with = "exact")]
    holder_us: f64,
    rows: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "MergeProfile", deny_unknown_fields)]
struct MergeForm {
    #[serde(with = "exact")]
    base_us: f64,
    #[serde(with = "exact")]
    part_us: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "KernelProfile", deny_unknown_fields)]
struct KernelForm {
    #[serde(with = "exact")]
    launch_us: f64,
    #[serde(with = "exact")]
    token_us: f64,
    flat_rows: u64,
    #[serde(with = "exact")]
    row_token_us: f64,
    #[serde(with = "SelectedForm")]
    selected: SelectedProfile,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "SelectedProfile", deny_unknown_fields)]
struct SelectedForm {
    #[serde(with = "exact")]
    base_factor: f64,
    #[serde(with = "exact")]
    token_factor: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "SsdProfile", deny_unknown_fields)]
pub(super) struct SsdForm {
    #[serde(with = "exact")]
    base_us: f64,
    #[serde(with = "exact")]
    bytes_per_us: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "PrefillProfile", deny_unknown_fields)]
pub(super) struct PrefillForm {
    #[serde(with = "exact")]
    base_us: f64,
    #[serde(with = "exact")]
    token_us: f64,
    #[serde(with = "exact")]
    pair_us: f64,
    #[serde(with = "exact")]
    reused_us: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "LinkProfile", deny_unknown_fields)]
pub(super) struct LinkForm {
    #[serde(with = "exact")]
    base_us: f64,
    #[serde(with = "exact")]
    bytes_per_us: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "LearnedDecode", deny_unknown_fields)]
pub(super) struct DecodeForm {
    #[serde(with = "exact")]
    base_us: f64,
    #[serde(with = "exact")]
    sequence_us: f64,
    #[serde(with = "exact")]
    token_us: f64,
    #[serde(with = "exact")]
    scale: f64,
    #[serde(with = "exact")]
    answer_us: f64,
    #[serde(with = "exact")]
    generated_tokens: f64,
}
