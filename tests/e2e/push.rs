//! The push goes layer by layer, while the prompt is still being computed: the two layer logs say
//! when each layer was computed and when its bytes left.
//!
//! Alone in its file, so that no other cluster takes the cores meanwhile.

use std::collections::BTreeMap;
use std::path::Path;

use crate::support::cluster::Cluster;
use crate::support::eventually;
use crate::support::vectors::Variant;
use serde_json::Value;

const LAYERS: u64 = 3;

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn number(line: &Value, key: &str) -> u64 {
    line[key].as_u64().unwrap_or_else(|| panic!("{key} is missing in {line}"))
}

/// When each (step, layer) was computed.
fn computed(dir: &Path) -> BTreeMap<(u64, u64), u64> {
    lines(&dir.join("prefill-1.log"))
        .iter()
        .map(|line| ((number(line, "step"), number(line, "layer")), number(line, "computed_us")))
        .collect()
}

#[tokio::test]
async fn on_a_throttled_domain_a_layer_leaves_before_the_next_one_is_computed() {
    let logs = tempfile::tempdir().expect("a folder");
    let flags = format!(
        "--transport tcp --prefill-chunk-tokens 512 --send-bytes-per-s-max 100000000 --layer-log-dir {}",
        logs.path().display()
    );
    let cluster = Cluster::start(&flags).await;
    let case = Variant::Plain.longest();
    let (status, answer) = cluster.complete(&case.prompt, 2).await;
    assert_eq!(status, 200, "{answer}");

    let chunks = case.prompt.len().div_ceil(512) as u64;
    let expected_lines = (chunks * LAYERS) as usize;
    let pushed = logs.path().join("prefill-1-node.log");
    eventually("the layer logs are written", async || {
        lines(&pushed).len() >= expected_lines && computed(logs.path()).len() >= expected_lines
    })
    .await;

    let computed = computed(logs.path());
    let pushes = lines(&pushed);
    assert_eq!(pushes.len(), expected_lines, "one push a chunk and layer");
    for push in &pushes {
        let (step, layer) = (number(push, "step"), number(push, "layer"));
        let own = computed[&(step, layer)];
        let issued = number(push, "issued_us");
        assert!(own <= issued, "layer {layer} of step {step} left before it was computed");
        assert!(issued <= number(push, "landed_us"));
        if let Some(next) = computed.get(&(step, layer + 1)) {
            assert!(
                issued < *next,
                "layer {layer} of step {step} left {} us after layer {} was computed",
                issued - next,
                layer + 1
            );
        }
    }
}
