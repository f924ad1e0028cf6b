//! The commands of the documentation are recorded in `commands.toml`: each block of commands has been run as written, a
//! test runs it, or its section names the hardware or service that it needs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use kvasir_tests_repository::{assert_none, files, read, root};

/// The entries of a page by the digest of their block.
type Record = BTreeMap<String, BTreeMap<String, toml::Table>>;

/// A block of commands, and the text of its section.
struct Block {
    line: usize,
    commands: String,
    section: String,
}

impl Block {
    /// An edited block gets another digest (FNV-1a), and must be run again.
    fn digest(&self) -> String {
        let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        format!("{:08x}", self.commands.bytes().fold(0x811c_9dc5, step))
    }

    fn first(&self) -> &str {
        self.commands.lines().next().unwrap_or_default()
    }
}

fn blocks(text: &str) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let mut section_start = 0;
    let (mut section, mut fence) = (String::new(), None);
    for (line, text) in (1..).zip(text.lines()) {
        let bare = text.trim();
        match (fence, bare.strip_prefix("```")) {
            (None, Some(language)) => {
                let is_commands = ["console", "sh", "bash"].contains(&language);
                fence = Some(is_commands);
                if is_commands {
                    found.push(Block { line, commands: String::new(), section: String::new() });
                }
            }
            (Some(_), Some(_)) => fence = None,
            (Some(is_commands), None) => {
                if is_commands {
                    let block = found.last_mut().expect("it has begun");
                    block.commands.push_str(bare);
                    block.commands.push('\n');
                }
            }
            (None, None) if bare.starts_with('#') => {
                finish_section(&mut found[section_start..], &mut section);
                section_start = found.len();
            }
            (None, None) => section = format!("{section} {bare}"),
        }
    }
    finish_section(&mut found[section_start..], &mut section);
    found
}

fn finish_section(blocks: &mut [Block], section: &mut String) {
    let text = std::mem::take(section);
    for block in blocks {
        block.section.clone_from(&text);
    }
}

/// The reason why an entry is no proof for its block.
fn objection(entry: &toml::Table, block: &Block) -> Option<String> {
    if entry.get("first").and_then(toml::Value::as_str) != Some(block.first()) {
        return Some("`first` is not its first line".into());
    }
    let checks: Vec<_> = entry.iter().filter(|(key, _)| *key != "first").collect();
    let [(check, value)] = checks[..] else {
        return Some("it needs exactly one of `ran`, `test` and `needs`".into());
    };
    match (check.as_str(), value) {
        ("ran", toml::Value::Datetime(date)) if date.date.is_some() => None,
        ("test", toml::Value::String(test)) => {
            let is_there = test.split_once("::").is_some_and(|(file, name)| {
                root().join(file).is_file() && read(Path::new(file)).contains(name)
            });
            (!is_there).then(|| format!("there is no test {test}"))
        }
        ("needs", toml::Value::String(needs)) => (!block.section.contains(needs.as_str()))
            .then(|| format!("the section of the block does not name {needs}")),
        _ => Some(format!("`{check}` is unknown or has the wrong type")),
    }
}

/// `page` and its entries agree, or the complaints.
fn complaints(
    page: &str,
    text: &str,
    entries: Option<&BTreeMap<String, toml::Table>>,
) -> Vec<String> {
    let blocks = blocks(text);
    let digests: BTreeSet<String> = blocks.iter().map(Block::digest).collect();
    let mut found: Vec<String> = blocks
        .iter()
        .filter_map(|block| {
            let (digest, first) = (block.digest(), toml::Value::from(block.first()));
            let place = format!("{page}:{}", block.line);
            match entries.and_then(|entries| entries.get(&digest)) {
                Some(entry) => Some(format!("{place}: {}", objection(entry, block)?)),
                None => Some(format!(
                    "{place}: run it and add: {digest} = {{ first = {first}, ran = YYYY-MM-DD }}"
                )),
            }
        })
        .collect();
    let gone = entries.into_iter().flatten().filter(|(digest, _)| !digests.contains(*digest));
    found.extend(
        gone.map(|(digest, _)| format!("{page}: delete {digest}, whose block does not exist")),
    );
    found
}

#[test]
fn each_block_of_commands_is_recorded() {
    let record: Record =
        toml::from_str(&read(Path::new("tests/repository/commands.toml"))).expect("valid TOML");
    let pages: Vec<String> = files(&[".md"])
        .iter()
        .filter(|path| path.starts_with("docs") || *path == Path::new("README.md"))
        .map(|path| path.to_string_lossy().into_owned())
        .collect();
    let mut found: Vec<String> = pages
        .iter()
        .flat_map(|page| complaints(page, &read(Path::new(page)), record.get(page)))
        .collect();
    let gone = record.keys().filter(|page| !pages.contains(page));
    found.extend(gone.map(|page| format!("delete {page}, which does not exist")));
    assert_none("run these commands and record them in tests/repository/commands.toml", &found);
}

#[test]
fn a_missing_changed_or_unfounded_entry_is_found() {
    let page = "# A\n\n```console\none\n```\n\n```toml\nkey = 1\n```\n## B\nIt needs a GPU.\n\n  ```sh\n  two \\\n    -x\n  ```\n";
    let check = |text: &str, record: &str| {
        let entries: BTreeMap<String, toml::Table> = toml::from_str(record).expect("valid TOML");
        complaints("p", text, Some(&entries))
    };
    let digests: Vec<String> = blocks(page).iter().map(Block::digest).collect();
    let [one, two] = &digests[..] else { panic!("{} blocks", digests.len()) };
    let record = |one_check: &str, two_check: &str| {
        format!(
            "{one} = {{ first = 'one', {one_check} }}\n{two} = {{ first = 'two \\', {two_check} }}"
        )
    };
    let good = record("ran = 2026-11-28", "needs = 'a GPU'");
    assert_eq!(check(page, &good), [""; 0]);
    let tested = record("test = 'README.md::cargo test'", "needs = 'a GPU'");
    assert_eq!(check(page, &tested), [""; 0]);
    assert_eq!(check(&page.replace("-x", "-y"), &good).len(), 2, "a new block, and one is gone");
    for bad in [
        record("ran = 'yesterday'", "needs = 'a GPU'"),
        record("needs = 'a GPU'", "needs = 'a GPU'"),
        record("test = 'README.md::no such text'", "needs = 'a GPU'"),
        record("ran = 2026-11-28, needs = 'a GPU'", "needs = 'a GPU'"),
        good.replace("'one'", "'other'"),
    ] {
        assert_eq!(check(page, &bad).len(), 1, "{bad}");
    }
}
