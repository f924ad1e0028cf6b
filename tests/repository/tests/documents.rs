//! Links between documents lead somewhere.

use std::path::Path;

use kvasir_tests_repository::{assert_none, files, read, root};

const DOCUMENTS: [&str; 3] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"];

/// The targets of `[text](target)`, outside of code.
fn links(text: &str) -> Vec<String> {
    let mut is_code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        }
        if is_code {
            continue;
        }
        let mut rest = line;
        while let Some(start) = rest.find("](") {
            rest = &rest[start + 2..];
            let Some(end) = rest.find(')') else { break };
            found.push(rest[..end].to_owned());
        }
    }
    found
}

fn is_elsewhere(link: &str) -> bool {
    ["http://", "https://", "mailto:"].iter().any(|scheme| link.starts_with(scheme))
}

/// As GitHub makes them from a heading.
fn anchors(text: &str) -> Vec<String> {
    text.lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| {
            let heading = line.trim_start_matches('#').trim().to_lowercase();
            heading
                .chars()
                .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
                .map(|c| if c == ' ' { '-' } else { c })
                .collect()
        })
        .collect()
}

fn broken(document: &Path, link: &str) -> bool {
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = match path {
        "" => root().join(document),
        path => root().join(document).parent().expect("a document lies in a folder").join(path),
    };
    if !target.exists() {
        return true;
    }
    let is_document = target.extension().is_some_and(|ending| ending == "md");
    !anchor.is_empty() && is_document && !anchors(&read(&target)).contains(&anchor.to_owned())
}

#[test]
fn links_within_the_repository_lead_somewhere() {
    let complaints: Vec<String> = files(&[".md"])
        .into_iter()
        .flat_map(|document| {
            let links = links(&read(&document));
            let bad =
                links.into_iter().filter(|link| !is_elsewhere(link) && broken(&document, link));
            bad.map(|link| format!("{}: {link}", document.display())).collect::<Vec<_>>()
        })
        .collect();
    assert_none("broken links", &complaints);
}

#[test]
fn the_documents_a_newcomer_needs_are_there() {
    for document in DOCUMENTS {
        assert!(root().join(document).is_file(), "{document} is missing");
    }
}

#[test]
fn the_readme_begins_with_the_two_commands() {
    let readme = read(Path::new("README.md"));
    let up = readme.find("cargo run --release -- up").expect("the first command");
    let test = readme.find("cargo test --workspace").expect("the second command");
    assert!(up < test, "the command that runs a cluster comes first");
}

#[test]
fn links_and_anchors_are_found_as_a_reader_finds_them() {
    assert_eq!(links("see [a](b.md) and [c](d#e)\n```\n[x](y)\n```\n"), ["b.md", "d#e"]);
    assert_eq!(anchors("# One, two `three`\ntext\n## A-b c"), ["one-two-three", "a-b-c"]);
    assert!(broken(Path::new("README.md"), "no/such/file.md"));
    assert!(broken(Path::new("README.md"), "#no-such-heading"));
    assert!(!broken(Path::new("README.md"), "LICENSE"));
}
