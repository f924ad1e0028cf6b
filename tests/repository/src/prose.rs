//! The sentences of the repository (documents, string literals, help texts and comments), for the test of their style.
//!
//! A [`Passage`] is text whose sentences belong together: a paragraph, a list item, a string literal, or consecutive
//! lines of comments. Code is not part of it.

use std::ops::Range;
use std::path::Path;

use regex::Regex;
use syn::visit::{self, Visit};

use crate::{files, python, read, script_line};

/// Text and the line at which it starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passage {
    pub file: String,
    pub line: usize,
    pub text: String,
}

/// Matches of one pattern are counted in one row.
#[derive(Debug)]
pub struct Row {
    pub name: &'static str,
    pattern: Regex,
}

/// The patterns of sentences that are hard to read.
pub fn rows() -> Vec<Row> {
    [
        ("clause as noun", r"(?-u)\b[Ww]hat (is|was|are|were|it|they|has|had|a|an|the|one|each)\b"),
        ("person", r"(?-u)\b[Ww]ho(ever|m)?\b"),
        ("body", r"(?-u)\b([Nn]o|[Ss]ome|[Aa]ny|[Ee]very)body\b"),
        ("so many", r"(?-u)\bso (many|long|much)\b"),
        ("lies", r"(?-u)\b(lies?|anew)\b"),
        ("opening", r"(?-u)(^|[.!?:;] )(Of|By what|What|Whence)\b"),
    ]
    .map(|(name, pattern)| Row { name, pattern: Regex::new(pattern).expect("a valid pattern") })
    .into()
}

impl Row {
    pub fn matches(&self, passage: &Passage) -> usize {
        self.pattern.find_iter(&passage.text).count()
    }
}

pub fn words(passage: &Passage) -> usize {
    let is_word = |word: &&str| word.chars().any(|c| c.is_ascii_alphabetic());
    passage.text.split_whitespace().filter(is_word).count()
}

/// All Markdown documents and the web page.
pub fn documents() -> Vec<Passage> {
    let markdown = files(&[".md"]).into_iter();
    let mut found: Vec<Passage> =
        markdown.flat_map(|path| paragraphs(&path.to_string_lossy(), &read(&path))).collect();
    for path in files(&[".html"]) {
        let lines = (1..).zip(read(&path).lines().map(str::to_owned).collect::<Vec<_>>());
        let passage =
            |(line, text)| Passage { file: path.to_string_lossy().into_owned(), line, text };
        found.extend(lines.map(passage));
    }
    found
}

/// String literals and help texts of the product (errors, logs, metrics and descriptions), and strings of Python.
pub fn literals() -> Vec<Passage> {
    let mut found = Vec::new();
    for path in files(&[".rs"]).iter().filter(|path| is_product(path)) {
        let (name, text) = (path.to_string_lossy(), read(path));
        let lexed = lex(&text);
        let is_sentence = |literal: &Passage| words(literal) >= 3;
        found.extend(lexed.passages(&name, &lexed.literals).into_iter().filter(is_sentence));
        found.extend(help(&name, &text));
    }
    for path in files(&[""]).iter().filter(|path| is_python(path) && !is_python_test(path)) {
        let found_here = python_strings(path, false).into_iter();
        found.extend(found_here.filter(|literal| words(literal) >= 3));
    }
    for path in files(&[".json"]).iter().filter(|path| path.to_string_lossy().contains("openapi")) {
        let text = read(path);
        let lexed = lex(&text);
        let found_here = lexed.passages(&path.to_string_lossy(), &lexed.literals);
        found.extend(found_here.into_iter().filter(|literal| words(literal) >= 3));
    }
    found
}

/// Comments of configurations, manifests, protobuf files and C headers, and docstrings of the Python client.
pub fn settings() -> Vec<Passage> {
    files(&[""])
        .iter()
        .filter(|path| is_setting(path))
        .flat_map(|path| file_comments(path))
        .collect()
}

/// Other comments and docstrings, by the package that they are in.
pub fn comments(package: &Path) -> Vec<Passage> {
    let is_here = |path: &Path| package_of(path) == package && !is_generated(path);
    let found = files(&[""]);
    let here = found.iter().filter(|path| is_here(path) && !is_setting(path));
    here.flat_map(|path| file_comments(path)).collect()
}

/// Whether a user reads a file's comments.
fn is_setting(path: &Path) -> bool {
    let name = path.to_string_lossy();
    match ending(path) {
        Some("proto" | "h") => true,
        Some("toml") => path.starts_with("configs"),
        Some("yaml") => path.starts_with("deploy"),
        Some("py") => path.starts_with("store-node/client/python"),
        _ => name.ends_with("Dockerfile"),
    }
}

fn ending(path: &Path) -> Option<&str> {
    path.extension().and_then(|ending| ending.to_str())
}

fn is_python(path: &Path) -> bool {
    ending(path) == Some("py") || script_line(path).is_some_and(|line| line.contains("python"))
}

/// The strings of tests are prompts and expected answers.
fn is_python_test(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("test_"))
}

fn file_comments(path: &Path) -> Vec<Passage> {
    match ending(path) {
        Some("rs" | "proto" | "cu" | "cuh" | "c" | "cc" | "cpp" | "h" | "hpp" | "mjs" | "css") => {
            let text = read(path);
            let lexed = lex(&text);
            lexed.passages(&path.to_string_lossy(), &lexed.comments)
        }
        Some("toml" | "yml" | "yaml" | "sh") => hash_comments(path),
        _ if is_python(path) => [hash_comments(path), python_strings(path, true)].concat(),
        _ if script_line(path).is_some() || path.ends_with("Dockerfile") => hash_comments(path),
        _ => Vec::new(),
    }
}

/// The docstrings of a Python file, or its other strings.
fn python_strings(path: &Path, docstrings: bool) -> Vec<Passage> {
    let name = path.to_string_lossy();
    let found = python::strings(&read(path)).into_iter();
    let of_kind = found.filter(|string| string.is_docstring == docstrings);
    of_kind
        .flat_map(|string| {
            paragraphs(&name, &string.text).into_iter().map(move |mut passage| {
                passage.line += string.line - 1;
                passage
            })
        })
        .collect()
}

/// The folder of the nearest `Cargo.toml` above a file.
pub fn package_of(path: &Path) -> &Path {
    let is_package = |folder: &&Path| crate::root().join(folder).join("Cargo.toml").is_file();
    path.ancestors().skip(1).find(is_package).unwrap_or(Path::new(""))
}

fn is_generated(path: &Path) -> bool {
    let path = path.to_string_lossy();
    path.contains("generated") || path.contains("bindings")
}

/// Not a test, a benchmark, an example or a fuzzer. `kvasir replay` is a command of the product.
fn is_product(path: &Path) -> bool {
    if path.starts_with("benches/replay/src") {
        return true;
    }
    let name = path.to_string_lossy();
    let is_aside = ["tests", "examples", "fuzz", "benches"].iter().any(|folder| {
        name.starts_with(&format!("{folder}/")) || name.contains(&format!("/{folder}/"))
    });
    !is_aside && !name.ends_with("tests.rs") && !is_generated(path)
}

/// Paragraphs, list items, headings and table cells, without code.
fn paragraphs(file: &str, text: &str) -> Vec<Passage> {
    let mut found: Vec<Passage> = Vec::new();
    let (mut is_code, mut goes_on) = (false, false);
    for (line, text) in (1..).zip(text.lines()) {
        let bare = text.trim();
        if bare.starts_with("```") {
            is_code = !is_code;
            goes_on = false;
            continue;
        }
        if is_code || bare.is_empty() {
            goes_on = false;
            continue;
        }
        let marker = ["- ", "* ", "#", "|", ">"].iter().any(|marker| bare.starts_with(marker))
            || bare.split_once(". ").is_some_and(|(number, _)| number.parse::<u32>().is_ok());
        if bare.starts_with('|') {
            let cells = bare.split('|').map(str::trim).filter(|cell| !cell.is_empty());
            found.extend(cells.map(|cell| passage(file, line, cell)));
            goes_on = false;
        } else if goes_on && !marker {
            let last = found.last_mut().expect("it goes on");
            last.text = format!("{} {}", last.text, without_code(bare));
        } else {
            let start = |c: char| "-*#>. ".contains(c) || c.is_ascii_digit();
            found.push(passage(file, line, bare.trim_start_matches(start)));
            goes_on = !bare.starts_with('#');
        }
    }
    found
}

fn passage(file: &str, line: usize, text: &str) -> Passage {
    Passage { file: file.to_owned(), line, text: without_code(text) }
}

/// Code spans become one word, so that a sentence about code keeps its shape.
fn without_code(text: &str) -> String {
    let mut parts = text.split('`');
    let mut bare = parts.next().unwrap_or_default().to_owned();
    for (at, part) in (1..).zip(parts) {
        bare.push_str(if at % 2 == 1 { "0" } else { part });
    }
    bare
}

/// Comments that begin with `#`, each with the lines that continue it.
fn hash_comments(path: &Path) -> Vec<Passage> {
    let name = path.to_string_lossy();
    let mut found: Vec<Passage> = Vec::new();
    let mut goes_on = false;
    for (line, text) in (1..).zip(read(path).lines()) {
        let Some(bare) = text.trim_start().strip_prefix('#') else {
            goes_on = false;
            continue;
        };
        if bare.starts_with('!') {
            continue;
        }
        let bare = bare.trim_start_matches('#').trim();
        match found.last_mut().filter(|_| goes_on && !bare.is_empty()) {
            Some(last) => last.text = format!("{} {}", last.text, without_code(bare)),
            None => found.push(passage(&name, line, bare)),
        }
        goes_on = !bare.is_empty();
    }
    found
}

/// The byte ranges of one literal, or of the lines of one comment.
type Span = Vec<Range<usize>>;

/// The literals and the comments of a file in Rust, C, CUDA, protobuf or JSON.
#[derive(Debug, Default)]
struct Lexed<'a> {
    source: &'a str,
    literals: Vec<Span>,
    /// Consecutive lines are one comment.
    comments: Vec<Span>,
}

impl Lexed<'_> {
    fn passages(&self, file: &str, spans: &[Span]) -> Vec<Passage> {
        let line = |at: usize| 1 + self.source[..at].matches('\n').count();
        let passage = |span: &Span| passage(file, line(span[0].start), &self.text(span));
        spans.iter().map(passage).collect()
    }

    fn text(&self, span: &Span) -> String {
        let mut is_code = false;
        let mut bare = Vec::new();
        for range in span {
            let line = self.source[range.clone()].trim_start_matches(['/', '!', '*']).trim();
            if line.starts_with("```") {
                is_code = !is_code;
            } else if !is_code {
                bare.push(line);
            }
        }
        // A backslash at the end of a line of a literal removes the line break and the next line's indentation.
        bare.join(" ").split("\\\n").map(str::trim_start).collect()
    }
}

fn span(start: usize, end: usize) -> Span {
    std::iter::once(start..end).collect()
}

/// The lines between two offsets, each from its first character that is not blank.
fn lines(source: &str, start: usize, end: usize) -> Span {
    let mut at = start;
    let mut found = Span::new();
    for line in source[start..end].split_inclusive('\n') {
        let blank = line.len() - line.trim_start().len();
        found.push(at + blank.min(line.len())..at + line.len());
        at += line.len();
    }
    found
}

fn lex(source: &str) -> Lexed<'_> {
    let mut lexed = Lexed { source, ..Lexed::default() };
    let bytes = source.as_bytes();
    let find = |at: usize, what: &str| source[at..].find(what).map_or(source.len(), |n| at + n);
    let (mut at, mut last_comment_end) = (0, usize::MAX);
    while at < bytes.len() {
        let rest = &source[at..];
        if rest.starts_with("//") {
            let end = find(at, "\n");
            let follows = source
                .get(last_comment_end..at)
                .is_some_and(|gap| gap.trim().is_empty() && gap.matches('\n').count() == 1);
            let is_empty = source[at..end].trim_start_matches(['/', '!']).trim().is_empty();
            match lexed.comments.last_mut().filter(|_| follows) {
                Some(last) => last.push(at..end),
                None => lexed.comments.push(span(at, end)),
            }
            last_comment_end = if is_empty { usize::MAX } else { end };
            at = end;
        } else if rest.starts_with("/*") {
            let end = find(at, "*/");
            lexed.comments.push(lines(source, at, end));
            last_comment_end = usize::MAX;
            at = (end + 2).min(source.len());
        } else if let Some(hashes) = raw_string(source, at) {
            let start = at + rest.find('"').expect("it has one") + 1;
            let end = find(start, &format!("\"{}", "#".repeat(hashes)));
            lexed.literals.push(span(start, end));
            at = end + 1 + hashes;
        } else if bytes[at] == b'"' {
            let mut end = at + 1;
            while end < bytes.len() && bytes[end] != b'"' {
                end += if bytes[end] == b'\\' { 2 } else { 1 };
            }
            lexed.literals.push(span(at + 1, end.min(bytes.len())));
            at = end + 1;
        } else if bytes[at] == b'\'' {
            at += character(rest);
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    lexed
}

/// The hashes of a raw string that begins here.
fn raw_string(source: &str, at: usize) -> Option<usize> {
    let before = source[..at].chars().next_back();
    if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
        return None;
    }
    let rest = source[at..].strip_prefix('b').unwrap_or(&source[at..]).strip_prefix('r')?;
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    rest[hashes..].starts_with('"').then_some(hashes)
}

/// The length of the character literal, or of the quote of a lifetime, that begins here.
fn character(rest: &str) -> usize {
    let mut chars = rest.char_indices().skip(1);
    match chars.next() {
        Some((_, '\\')) => rest[2..].find('\'').map_or(1, |n| 2 + n + 1).max(4),
        Some((at, c)) if rest[at + c.len_utf8()..].starts_with('\'') => at + c.len_utf8() + 1,
        _ => 1,
    }
}

/// Documentation that `clap` prints or that becomes a reference of configuration keys.
fn help(file: &str, source: &str) -> Vec<Passage> {
    let Ok(parsed) = syn::parse_file(source) else { return Vec::new() };
    let mut helps = Helps { file, found: Vec::new() };
    helps.visit_file(&parsed);
    helps.found
}

struct Helps<'a> {
    file: &'a str,
    found: Vec<Passage>,
}

impl Helps<'_> {
    fn take(&mut self, name: &syn::Ident, attributes: &[syn::Attribute]) {
        let lines: Vec<String> = attributes.iter().filter_map(doc).collect();
        if !lines.is_empty() {
            let file = format!("{}: `{name}`", self.file);
            self.found.push(passage(&file, 1, &lines.join(" ")));
        }
    }
}

fn doc(attribute: &syn::Attribute) -> Option<String> {
    match &attribute.meta {
        syn::Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => {
                Some(text.value().trim().to_owned())
            }
            _ => None,
        },
        _ => None,
    }
}

/// Whether a type's documentation is printed.
fn is_printed(attributes: &[syn::Attribute]) -> bool {
    let derives = attributes.iter().filter_map(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("derive") => Some(list.tokens.to_string()),
        _ => None,
    });
    let printed = ["Args", "Subcommand", "Parser", "JsonSchema", "ValueEnum"];
    derives.into_iter().any(|derives| printed.iter().any(|name| derives.contains(name)))
}

impl<'ast> Visit<'ast> for Helps<'_> {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        if is_printed(&item.attrs) {
            self.take(&item.ident, &item.attrs);
            for field in &item.fields {
                let name = field.ident.clone().unwrap_or_else(|| item.ident.clone());
                self.take(&name, &field.attrs);
            }
        }
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        if is_printed(&item.attrs) {
            self.take(&item.ident, &item.attrs);
            for variant in &item.variants {
                self.take(&variant.ident, &variant.attrs);
                for field in &variant.fields {
                    let name = field.ident.clone().unwrap_or_else(|| variant.ident.clone());
                    self.take(&name, &field.attrs);
                }
            }
        }
        visit::visit_item_enum(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<&'static str> {
        let passage = passage("f", 1, text);
        let mut names = Vec::new();
        for row in rows() {
            names.extend(std::iter::repeat_n(row.name, row.matches(&passage)));
        }
        names
    }

    #[test]
    fn each_row_counts_its_own_pattern() {
        assert_eq!(found("It sends what it has."), ["clause as noun"]);
        assert_eq!(found("Whoever waits is whom it serves."), ["person", "person"]);
        assert_eq!(found("Nobody and somebody."), ["body", "body"]);
        assert_eq!(found("It takes so many, for so long."), ["so many", "so many"]);
        assert_eq!(found("It lies there and is read anew."), ["lies", "lies"]);
        assert_eq!(found("Of two one is taken. Of three none."), ["opening", "opening"]);
        assert_eq!(found("What the node said."), ["clause as noun", "opening"]);
        assert_eq!(found("The store node sends in-flight pages. A copy of each stays."), [""; 0]);
    }

    #[test]
    fn code_spans_and_blocks_are_no_text() {
        let text = "One `what is` two.\nthree\n\n```console\nwhat is\n```\n- four\n| a | b |\n";
        let texts: Vec<String> = paragraphs("f", text).into_iter().map(|one| one.text).collect();
        assert_eq!(texts, ["One 0 two. three", "four", "a", "b"]);
    }

    #[test]
    fn literals_and_comments_of_rust_are_told_apart() {
        let source = "//! Head.\n//! More.\n/* Block\n * goes on. */\nfn f<'a>() { let c = '\"'; let s = \"a // b \\\n   c\"; }\n\
                      /// Doc.\nconst R: &str = r#\"x \"y\" z\"#; // aside\n";
        let lexed = lex(source);
        let texts = |of: Vec<Passage>| of.into_iter().map(|one| one.text).collect::<Vec<_>>();
        assert_eq!(texts(lexed.passages("f", &lexed.literals)), ["a // b c", "x \"y\" z"]);
        assert_eq!(
            texts(lexed.passages("f", &lexed.comments)),
            ["Head. More.", "Block goes on.", "Doc.", "aside"]
        );
    }

    #[test]
    fn help_is_the_documentation_of_what_is_printed() {
        let source = "/// Flags.\n#[derive(Debug, clap::Args)]\nstruct F {\n/// One.\na: u8 }\n/// Not.\nstruct G;";
        let texts: Vec<String> = help("f", source).into_iter().map(|one| one.text).collect();
        assert_eq!(texts, ["Flags.", "One."]);
    }

    fn files_of(found: &[Passage]) -> Vec<&str> {
        found.iter().map(|passage| passage.file.as_str()).collect()
    }

    #[test]
    fn scripts_dockerfiles_cpp_and_docstrings_are_scanned() {
        let (root, attention) =
            (comments(Path::new("")), comments(Path::new("store-node/attention")));
        let scripts = [".ci/run", "deploy/split-debug", "docs/build", "tests/verbs-vm/init"];
        for script in scripts {
            assert!(files_of(&root).contains(&script), "{script} has comments");
        }
        assert!(!root.iter().any(|passage| passage.text.starts_with("!/")), "`#!` is no comment");
        assert!(files_of(&attention).contains(&"store-node/attention/tests/cuda/driver.cpp"));
        let has_docstring =
            |passage: &Passage| passage.file == "tests/e2e/test_node.py" && passage.line == 1;
        assert!(root.iter().any(has_docstring));
        let settings = settings();
        assert!(files_of(&settings).contains(&"deploy/Dockerfile"));
        assert!(files_of(&settings).contains(&"store-node/client/python/kvasir_client/engine.py"));
    }

    #[test]
    fn errors_and_help_of_replay_and_of_python_are_scanned() {
        assert!(is_product(Path::new("benches/replay/src/report.rs")));
        assert!(!is_product(Path::new("benches/replay/tests/roles.rs")));
        let found = literals();
        for file in [
            "benches/replay/src/trace.rs",
            "benches/peers/store/compare.py",
            "store-node/client/python/kvasir_client/__init__.py",
        ] {
            assert!(files_of(&found).contains(&file), "{file} has literals");
        }
        assert!(!files_of(&found).contains(&"tests/e2e/test_openai.py"));
    }
}
