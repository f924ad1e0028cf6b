//! Applies one mutation after the other in one mutation build, and reports which test finds it.
//!
//! `cargo run -p kvasir-mutation -- [--list | --table] [--again] [NAME...]`; see `README.md`.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for a terminal")]

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

use kvasir_mutation::{Finder, POINTS, Point};

const USAGE: &str = "usage: kvasir-mutation [--list | --table] [--again] [NAME...]\n\n\
    Applies each mutation (or those that are named) and runs the test that must find it.\n\
    --list   print the mutations and end\n\
    --table  print the results of earlier runs on this source tree as a table and end\n\
    --again  forget the results of earlier runs on this source tree";
const CLUSTER_SEEDS: &str = "1000";
const FAILOVER_SEEDS: &str = "300";
/// A suite without seeds may miss a mutation by luck.
const TRIES_MAX: u32 = 5;
/// Seconds. A test that does not end says nothing about the fault.
const SUITE_TIMEOUT: &str = "3600";
/// The exit statuses of `timeout` when the time is over: after the first signal, and after `--kill-after`.
const TIMED_OUT: [i32; 2] = [124, 137];
/// The exit status of `tests/verbs-vm/run` when the virtual machine died.
const MACHINE_DIED: i32 = 125;

fn main() -> ExitCode {
    match run(std::env::args().skip(1)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(sentence) => {
            eprintln!("{sentence}");
            ExitCode::from(2)
        }
    }
}

/// Whether every mutation was found.
fn run(arguments: impl Iterator<Item = String>) -> Result<bool, String> {
    let mut names = Vec::new();
    let (mut lists, mut tabulates, mut again) = (false, false, false);
    for argument in arguments {
        match argument.as_str() {
            "--list" => lists = true,
            "--table" => tabulates = true,
            "--again" => again = true,
            flag if flag.starts_with('-') => return Err(USAGE.to_owned()),
            name => names.push(point(name)?),
        }
    }
    let selected = if names.is_empty() { POINTS.to_vec() } else { names };
    if lists {
        for Point { name, effect, finder, .. } in selected {
            println!("{name}: {} [{}]", effect.trim(), suite(finder).join(" "));
        }
        return Ok(true);
    }
    let workshop = Workshop::open()?;
    if tabulates {
        println!("{}", table(&selected, &workshop.earlier()));
        return Ok(true);
    }
    if again {
        workshop.forget()?;
    }
    workshop.find_all(&selected)
}

/// The findings as Markdown.
fn table(selected: &[Point], earlier: &BTreeMap<String, String>) -> String {
    let mut table =
        String::from("| mutation | finder | first words of the failure |\n| --- | --- | --- |");
    for &Point { name, finder, .. } in selected {
        let finder = match finder {
            Finder::ClusterSimulation => "cluster simulation".to_owned(),
            Finder::FailoverSimulation => "failover simulation".to_owned(),
            Finder::Tests(arguments) => format!("`{arguments}`"),
            Finder::VirtualMachine(filter) => format!("virtual machine, `{filter}`"),
        };
        let found = earlier.get(name).map_or("not found yet", |found| found.as_str());
        // A bar would end the cell, and a backquote the code.
        let found = found.replace('|', "/").replace('`', "'");
        table += &format!("\n| `{name}` | {finder} | `{found}` |");
    }
    table
}

fn point(name: &str) -> Result<Point, String> {
    Point::find(name).ok_or_else(|| format!("no mutation is called {name}; see --list"))
}

/// The command, without the program that limits its time.
fn suite(finder: Finder) -> Vec<&'static str> {
    match finder {
        Finder::ClusterSimulation => words(
            "cargo test -q -p kvasir-cluster-sim --test simulation \
             whatever_fails_nothing_happens_that_must_not",
        ),
        Finder::FailoverSimulation => {
            words("cargo test -q -p kvasir-transfer --test sim_failover whatever_fails")
        }
        Finder::Tests(arguments) => [words("cargo test -q"), words(arguments)].concat(),
        Finder::VirtualMachine(_) => words("tests/verbs-vm/run -p kvasir-transfer --test parts"),
    }
}

fn words(text: &'static str) -> Vec<&'static str> {
    text.split_whitespace().collect()
}

/// The result of a suite under a mutation.
enum Verdict {
    /// It failed: the test, if its output names one, and the first words about it.
    Found { test: Option<String>, words: String },
    /// It passed.
    Missed,
    /// The run is not valid: the suite did not build, ran no test, or did not end.
    Broken(String),
}

/// Where mutations are built, and the results for one source tree.
struct Workshop {
    root: PathBuf,
    target: PathBuf,
    results: PathBuf,
    tree: String,
}

impl Workshop {
    fn open() -> Result<Workshop, String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let root = root.canonicalize().map_err(|error| error.to_string())?;
        let target = root.join("target/mutation");
        fs::create_dir_all(&target).map_err(|error| format!("{}: {error}", target.display()))?;
        let tree = source_tree(&root, &target)?;
        let results = target.join(format!("found-{tree}.tsv"));
        eprintln!("results: {}", results.display());
        Ok(Workshop { root, target, results, tree })
    }

    fn forget(&self) -> Result<(), String> {
        match fs::remove_file(&self.results) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(format!("{}: {error}", self.results.display()))
            }
            _ => Ok(()),
        }
    }

    /// The findings of earlier runs on this tree. A line that was cut off is ignored.
    fn earlier(&self) -> BTreeMap<String, String> {
        let text = fs::read_to_string(&self.results).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let row =
            |line: &str| line.split_once('\t').map(|(name, found)| (name.into(), found.into()));
        whole.lines().filter_map(row).collect()
    }

    /// Keeps a result, unless a file has changed since the start: then it belongs to no tree.
    fn note(&self, name: &str, found: &str) -> Result<(), String> {
        if source_tree(&self.root, &self.target)? != self.tree {
            return Err("a file changed during the run; run the command again".to_owned());
        }
        let file = OpenOptions::new().create(true).append(true).open(&self.results);
        file.and_then(|mut file| file.write_all(format!("{name}\t{found}\n").as_bytes()))
            .map_err(|error| format!("{}: {error}", self.results.display()))
    }

    fn find_all(&self, selected: &[Point]) -> Result<bool, String> {
        let mut earlier = self.earlier();
        let mut missed = Vec::new();
        // In this build, the test of the ordinary binary finds every mutation.
        if let Verdict::Found { words: why, .. } | Verdict::Broken(why) =
            self.verdict(Finder::Tests("-p kvasir --test binary"), None)
        {
            return Err(format!("the binary lacks mutations: {why}"));
        }
        for &Point { name, finder, .. } in selected {
            if let Some(found) = earlier.get(name) {
                println!("{name}: found earlier: {found}");
                continue;
            }
            let suite = suite(finder);
            // A finder that fails without a mutation finds nothing.
            if let Entry::Vacant(baseline) = earlier.entry(format!("{finder:?}")) {
                match self.verdict(finder, None) {
                    Verdict::Missed => self.note(baseline.key(), "passes without a mutation")?,
                    Verdict::Found { words: why, .. } | Verdict::Broken(why) => {
                        println!("{name}: `{}` fails without a mutation: {why}", suite.join(" "));
                        missed.push(name);
                        continue;
                    }
                }
                baseline.insert(String::new());
            }
            match self.search(finder, name) {
                Verdict::Found { test, words } => {
                    let what = test.map_or(words.clone(), |test| format!("{test}: {words}"));
                    let what = cut(&what);
                    println!("{name}: found: {what}");
                    self.note(name, &what)?;
                }
                Verdict::Missed => {
                    println!("{name}: NOT FOUND by `{}`", suite.join(" "));
                    missed.push(name);
                }
                Verdict::Broken(why) => {
                    println!("{name}: {why}");
                    missed.push(name);
                }
            }
        }
        println!("{} of {} mutations found", selected.len() - missed.len(), selected.len());
        Ok(missed.is_empty())
    }

    /// The result of a finder under a mutation. A suite without seeds runs several times, and the test that finds the
    /// mutation must fail twice: a test that fails now and then would find anything.
    fn search(&self, finder: Finder, name: &str) -> Verdict {
        let is_seeded = !matches!(finder, Finder::Tests(_));
        let mut failed = BTreeSet::new();
        for _ in 0..if is_seeded { 1 } else { TRIES_MAX } {
            match self.verdict(finder, Some(name)) {
                Verdict::Missed => {}
                Verdict::Found { test, words } => {
                    if is_seeded || !failed.insert(test.clone()) {
                        return Verdict::Found { test, words };
                    }
                }
                broken @ Verdict::Broken(_) => return broken,
            }
        }
        Verdict::Missed
    }

    fn verdict(&self, finder: Finder, mutation: Option<&str>) -> Verdict {
        let output = match self.run(finder, mutation) {
            Ok(output) => output,
            Err(error) => return Verdict::Broken(format!("`timeout` cannot be started: {error}")),
        };
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        let log = self.target.join("last.log");
        let _ = fs::write(&log, text.as_bytes());
        if output.status.success() {
            return match text.lines().any(ran_a_test) {
                true => Verdict::Missed,
                false => Verdict::Broken(format!("no test ran; see {}", log.display())),
            };
        }
        let broken = |what: &str| Verdict::Broken(format!("{what}; see {}", log.display()));
        match output.status.code() {
            Some(code) if TIMED_OUT.contains(&code) => broken("the tests do not end"),
            Some(MACHINE_DIED) if matches!(finder, Finder::VirtualMachine(_)) => {
                broken("the virtual machine died")
            }
            _ if text.contains("error: could not compile") => broken("it does not build"),
            _ => {
                let is_simulation =
                    matches!(finder, Finder::ClusterSimulation | Finder::FailoverSimulation);
                // Any other panic of a simulation is a fault of its own.
                let counts = |words: &String| !is_simulation || words.contains("seed ");
                let words = failing_seed(&text);
                let words = words.or_else(|| panic_message(&text).filter(counts));
                let test = failing_test(&text);
                words.map_or_else(
                    || broken("no test failed"),
                    |words| Verdict::Found { test, words },
                )
            }
        }
    }

    fn run(&self, finder: Finder, mutation: Option<&str>) -> std::io::Result<Output> {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", SUITE_TIMEOUT]).args(suite(finder));
        command.current_dir(&self.root).env("CARGO_TARGET_DIR", &self.target);
        command.env("RUSTFLAGS", "--cfg kvasir_mutations").env("RUST_BACKTRACE", "0");
        command.env_remove("KVASIR_MUTATION").envs(mutation.map(|name| ("KVASIR_MUTATION", name)));
        let seeds = match finder {
            Finder::ClusterSimulation => CLUSTER_SEEDS,
            _ => FAILOVER_SEEDS,
        };
        command.env("KVASIR_SIM_SEED", "0").env("KVASIR_SIM_SEEDS", seeds);
        // Do not shrink a failing seed: only its failure matters.
        command.env("KVASIR_SIM_SHRINK", "0").env("KVASIR_VERBS_VM_SECONDS", "600");
        // A file of failing cases would change the source tree, and with it where the results are.
        command.env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1");
        if let Finder::VirtualMachine(filter) = finder {
            command.env("KVASIR_VERBS_VM_FILTER", filter);
        }
        command.output()
    }
}

/// The hash of the tree of all files that are not ignored, as Git computes it.
fn source_tree(root: &Path, target: &Path) -> Result<String, String> {
    // A run that was killed leaves its index locked.
    let index = target.join(format!("index-{}", std::process::id()));
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        command.arg("-C").arg(root).args(arguments).env("GIT_INDEX_FILE", &index);
        let output = command.output().map_err(|error| format!("git cannot be started: {error}"))?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
            false => Err(format!("git: {}", String::from_utf8_lossy(&output.stderr).trim())),
        }
    };
    let tree = git(&["add", "--all"]).and_then(|_| git(&["write-tree"]));
    let _ = fs::remove_file(&index);
    tree
}

/// Whether a line is the closing line of a test program that ran at least one test.
fn ran_a_test(line: &str) -> bool {
    line.starts_with("test result: ") && !line.contains(" 0 passed")
}

/// The seed that failed in a simulation, and the checker's words.
fn failing_seed(text: &str) -> Option<String> {
    let mut lines = text.lines();
    let line = lines.find(|line| line.starts_with("seed ") && line.contains(": "))?;
    // A simulation may print a list below its seed.
    Some(match line.strip_suffix('[') {
        Some(start) => format!("{start}{}", lines.next().unwrap_or_default().trim()),
        None => line.to_owned(),
    })
}

/// The first test whose captured output the test program prints because it failed.
fn failing_test(text: &str) -> Option<String> {
    let name =
        |line: &str| Some(line.strip_prefix("---- ")?.strip_suffix(" stdout ----")?.to_owned());
    text.lines().find_map(name)
}

/// The message of the first panic, or its place if it has no message.
fn panic_message(text: &str) -> Option<String> {
    let mut lines = text.lines().skip_while(|line| !line.contains("panicked at"));
    let place = lines.next()?;
    Some(lines.next().filter(|said| !said.is_empty()).unwrap_or(place).to_owned())
}

/// The first characters of a message, in one cell of a table.
fn cut(words: &str) -> String {
    words.replace('\t', " ").chars().take(160).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_told_by_its_seed_or_by_its_panic() {
        let seed = |text: &str, want: Option<&str>| assert_eq!(failing_seed(text).as_deref(), want);
        seed("running\nseed 7: I3 bytes at 12 us: x\nmore", Some("seed 7: I3 bytes at 12 us: x"));
        seed("seed 7: [\n    I6 leases,\n]", Some("seed 7: I6 leases,"));
        seed("seeds: 7", None);
        let panic = |text: &str, want: Option<&str>| {
            assert_eq!(panic_message(text).as_deref(), want);
        };
        panic("thread 'a' panicked at b.rs:1:2:\nleft is right\n", Some("left is right"));
        panic("thread 'a' panicked at b.rs:1:2:", Some("thread 'a' panicked at b.rs:1:2:"));
        panic("signal: 11, SIGSEGV", None);
        let test = |text: &str| failing_test(text);
        assert_eq!(test("x\n---- a::b stdout ----\n\nthread"), Some("a::b".to_owned()));
        assert_eq!(test("signal: 11, SIGSEGV"), None);
    }

    #[test]
    fn a_suite_that_ran_no_test_is_noticed() {
        assert!(ran_a_test("test result: ok. 3 passed; 0 failed; 0 ignored"));
        assert!(!ran_a_test("test result: ok. 0 passed; 0 failed; 9 filtered out"));
    }

    #[test]
    fn a_table_has_a_row_for_each_mutation() {
        let selected = [point("TombstoneOmitted"), point("LeaseOrderReversed")];
        let selected = selected.map(|point| point.expect("it is in the list"));
        let earlier =
            BTreeMap::from([("LeaseOrderReversed".to_owned(), "seed 21: `a` | b".to_owned())]);
        let rows: Vec<String> =
            table(&selected, &earlier).lines().skip(2).map(str::to_owned).collect();
        assert_eq!(rows.len(), 2);
        assert!(rows[0].ends_with("| `not found yet` |"), "{}", rows[0]);
        assert_eq!(rows[1], "| `LeaseOrderReversed` | cluster simulation | `seed 21: 'a' / b` |");
    }

    #[test]
    fn a_name_that_no_mutation_has_is_refused() {
        assert!(point("NoSuchMutation").is_err());
    }
}
