//! `kvasir doctor` as somebody meets it who has just installed it.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

const KVASIR: &str = env!("CARGO_BIN_EXE_kvasir");

fn doctor(arguments: &[&str]) -> Output {
    let mut command = Command::new(KVASIR);
    command.args(["--log", "warn", "doctor"]).args(arguments).stdin(Stdio::null());
    command.output().expect("it can be started")
}

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

/// The half that waits, ended with the test.
struct Server {
    child: Child,
    port: String,
}

impl Server {
    fn start() -> Server {
        Server::start_with(&[])
    }

    fn start_with(flags: &[&str]) -> Server {
        let mut child = Command::new(KVASIR)
            .args(["--log", "warn", "doctor", "--serve", "127.0.0.1:0"])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it can be started");
        let mut line = String::new();
        let output = child.stdout.as_mut().expect("a pipe");
        BufReader::new(output).read_line(&mut line).expect("it says where it waits");
        let port = line.trim().rsplit(':').next().expect("a port").to_owned();
        Server { child, port }
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it is our child");
    }
}

#[test]
fn it_says_what_the_host_offers_and_what_would_be_chosen() {
    let text = said(&doctor(&["--no-probe"]));
    for word in ["host", "devices", "would use", "locked memory", "same host", "other hosts"] {
        assert!(text.contains(word), "{word} is missing in {text}");
    }
    assert!(!text.contains("measured"), "{text}");
}

#[test]
fn both_domains_are_measured_on_one_host() {
    let text = said(&doctor(&["--json"]));
    let report: Value = serde_json::from_str(&text).expect("JSON and nothing else");
    let probes = report["probes"].as_array().expect("a list");
    let ways: Vec<&str> = probes.iter().filter_map(|probe| probe["transport"].as_str()).collect();
    assert_eq!(ways, ["shm on this host", "tcp on this host"]);
    for point in probes.iter().flat_map(|probe| probe["points"].as_array().expect("a list")) {
        assert!(point["gigabytes_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{point}");
        assert!(point["p50_us"].as_f64() <= point["p99_us"].as_f64(), "{point}");
    }
}

fn vectors(name: &str) -> String {
    format!("{}/../tests/data/{name}.safetensors", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn attention_kernels_are_judged_by_files_of_vectors() {
    let files =
        ["mla_partial/narrow_model", "mla_partial/selected_64", "mla_partial_types/fp8_batch"];
    let files = files.map(vectors);
    let text = said(&doctor(&["--attention", &files[0], &files[1], &files[2]]));
    for word in ["scalar", "portable", "merge of partials", "narrow_model", "rows of Fp8Latent"] {
        assert!(text.contains(word), "{word} is missing in {text}");
    }
    assert!(text.contains(": ok") && !text.contains("failed"), "{text}");
}

#[test]
fn a_file_of_vectors_that_is_wrong_or_broken_fails_and_the_others_are_still_checked() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let good = std::fs::read(vectors("mla_partial/narrow_model")).expect("test data");
    std::fs::write(path("short"), &good[..good.len() / 2]).expect("written");
    // The last bytes are the last tensor's; a largest logit, an output or a share changes.
    let header = u64::from_le_bytes(good[..8].try_into().expect("eight bytes")) as usize;
    let text = std::str::from_utf8(&good[8..8 + header]).expect("a header");
    let m = text.split("\"m\"").nth(1).and_then(|rest| rest.split("data_offsets\":[").nth(1));
    let m: usize = m.and_then(|rest| rest.split(',').next()?.parse().ok()).expect("an offset");
    let mut wrong = good.clone();
    wrong[8 + header + m + 3] ^= 0x04;
    std::fs::write(path("wrong"), &wrong).expect("written");
    let output = doctor(&[
        "--attention",
        &path("short"),
        &path("none"),
        &path("wrong"),
        &vectors("mla_partial/one_row"),
    ]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(": failed") && text.contains("one_row"), "{text}");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("short: not a safetensors file"), "{complaint}");
    assert!(complaint.contains("none: No such file"), "{complaint}");
    assert!(complaint.contains("3 of 4 files failed"), "{complaint}");
}

#[test]
fn two_of_them_measure_the_way_between_them_and_strangers_do_not_end_the_server() {
    let server = Server::start();
    let mut stranger = TcpStream::connect(server.address()).expect("it listens");
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("it reads");
    drop(stranger);
    let text = said(&doctor(&["--peer", &server.address()]));
    assert!(
        text.contains(&format!("measured: shm, from 127.0.0.1 to {}", server.address())),
        "{text}"
    );
}

/// Where libfabric is installed, the domain of EFA is measured by a provider that needs no such network.
#[test]
fn the_efa_domain_is_measured_by_the_provider_that_is_named() {
    let has_libfabric = kvasir_transfer_libfabric::library::Library::open().is_ok();
    let text = said(&doctor(&["--efa-provider", "tcp"]));
    assert_eq!(text.contains("measured: efa on this host"), has_libfabric, "{text}");
    let server = Server::start_with(&["--efa-provider", "tcp"]);
    let text = said(&doctor(&["--peer", &server.address(), "--efa-provider", "tcp"]));
    let measured = format!("measured: efa, from 127.0.0.1 to {}", server.address());
    assert_eq!(text.contains(&measured), has_libfabric, "{text}");
    // One side alone has it.
    let text = said(&doctor(&["--peer", &server.address()]));
    assert!(!text.contains("measured: efa"), "{text}");
    assert_eq!(text.contains("has it, but this host does not"), has_libfabric, "{text}");
}

#[test]
fn a_peer_that_cannot_be_reached_is_one_sentence() {
    let output = doctor(&["--peer", "127.0.0.1:1"]);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{complaint}");
    assert_eq!(complaint.lines().count(), 1, "{complaint}");
    assert!(complaint.contains("kvasir doctor --serve"), "{complaint}");
}
