//! Reads the modules that a Rust file declares and the items that it re-exports. It reads tokens, so that comments,
//! strings, attributes and the layout of the text do not matter. It expands no macros.

/// A module or a re-export that is visible outside the module it stands in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declaration {
    pub line: usize,
    /// The inline modules around it.
    pub scope: Vec<String>,
    /// It is plain `pub`, without `(crate)` or the like.
    pub is_public: bool,
    pub kind: DeclarationKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeclarationKind {
    /// `pub mod name`.
    Module(String),
    /// One leaf of a `pub use`. A glob ends in `*`, and a path that begins with `::` in an empty segment.
    Reexport(Vec<String>),
}

#[derive(Debug, Clone)]
struct Token {
    line: usize,
    text: String,
}

/// The end of a quoted literal whose first quote is before `at`.
fn quoted_end(text: &[char], mut at: usize, quote: char) -> usize {
    while at < text.len() && text[at] != quote {
        at += if text[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

/// The end of a raw string whose hashes begin at `at`, if a raw string begins there.
fn raw_end(text: &[char], at: usize) -> Option<usize> {
    let hashes = text[at..].iter().take_while(|it| **it == '#').count();
    if text.get(at + hashes) != Some(&'"') {
        return None;
    }
    let body = at + hashes + 1;
    let closes = |end: &usize| {
        text[*end] == '"' && text[end + 1..].iter().take_while(|it| **it == '#').count() >= hashes
    };
    Some((body..text.len()).find(closes).map_or(text.len(), |end| end + 1 + hashes))
}

fn block_comment_end(text: &[char], mut at: usize) -> usize {
    let mut depth = 0;
    while at < text.len() {
        match (text[at], text.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// Words and punctuation. Literals, lifetimes and comments are left out.
fn tokens(text: &str) -> Vec<Token> {
    let text: Vec<char> = text.chars().collect();
    let is_word = |it: char| it.is_alphanumeric() || it == '_';
    let (mut found, mut line, mut counted, mut at) = (Vec::new(), 1, 0, 0);
    while at < text.len() {
        line += text[counted..at].iter().filter(|it| **it == '\n').count();
        counted = at;
        let next = text.get(at + 1).copied();
        match text[at] {
            '/' if next == Some('/') => {
                at += text[at..].iter().take_while(|it| **it != '\n').count();
            }
            '/' if next == Some('*') => at = block_comment_end(&text, at),
            '"' => at = quoted_end(&text, at + 1, '"'),
            // A lifetime has no second quote behind its first letter.
            '\'' if next == Some('\\') || text.get(at + 2) == Some(&'\'') => {
                at = quoted_end(&text, at + 1, '\'');
            }
            '\'' => at += 1 + text[at + 1..].iter().take_while(|it| is_word(**it)).count(),
            letter if is_word(letter) => {
                let end = at + text[at..].iter().take_while(|it| is_word(**it)).count();
                let word: String = text[at..end].iter().collect();
                let raw = matches!(word.as_str(), "r" | "br" | "cr").then(|| raw_end(&text, end));
                if let Some(Some(end)) = raw {
                    at = end;
                } else if word == "r" && text.get(end) == Some(&'#') {
                    at = end + 1;
                } else {
                    found.push(Token { line, text: word });
                    at = end;
                }
            }
            space if space.is_whitespace() => at += 1,
            sign => {
                found.push(Token { line, text: sign.into() });
                at += 1;
            }
        }
    }
    found
}

struct Reader {
    tokens: Vec<Token>,
    at: usize,
}

impl Reader {
    fn peek(&self, ahead: usize) -> &str {
        self.tokens.get(self.at + ahead).map_or("", |token| &token.text)
    }

    /// Whether the next token is this one. If so, it is taken.
    fn take(&mut self, text: &str) -> bool {
        let is_next = self.peek(0) == text;
        self.at += usize::from(is_next);
        is_next
    }

    /// Passes over a group that begins at the next token.
    fn pass_group(&mut self, open: &str, close: &str) {
        let mut depth = 0;
        while self.at < self.tokens.len() {
            let token = self.peek(0);
            depth += i32::from(token == open) - i32::from(token == close);
            self.at += 1;
            if depth == 0 {
                break;
            }
        }
    }

    /// The leaves of a tree of `use`, each with the segments before it.
    fn leaves(&mut self, before: &[String], found: &mut Vec<Vec<String>>) {
        let mut path = before.to_vec();
        loop {
            if self.peek(0) == ":" && self.peek(1) == ":" {
                if path.is_empty() {
                    path.push(String::new());
                }
                self.at += 2;
            } else if self.take("{") {
                while self.at < self.tokens.len() && !self.take("}") {
                    self.leaves(&path, found);
                    self.take(",");
                }
                return;
            } else {
                path.push(self.peek(0).to_owned());
                self.at += 1;
                if self.peek(0) != ":" {
                    break;
                }
            }
        }
        if self.take("as") {
            self.at += 1;
        }
        if path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        found.push(path);
    }
}

/// All modules and re-exports of a file that are visible outside the module they stand in.
pub fn declarations(text: &str) -> Vec<Declaration> {
    let mut reader = Reader { tokens: tokens(text), at: 0 };
    let mut found = Vec::new();
    // One entry for each open brace: the name of the inline module that it opens.
    let mut braces: Vec<Option<String>> = Vec::new();
    while reader.at < reader.tokens.len() {
        let line = reader.tokens[reader.at].line;
        if reader.peek(0) == "#" && reader.peek(1) == "[" {
            reader.at += 1;
            reader.pass_group("[", "]");
            continue;
        }
        let has_visibility = reader.take("pub");
        let mut is_public = has_visibility;
        let mut is_visible = has_visibility;
        if has_visibility && reader.peek(0) == "(" {
            (is_public, is_visible) = (false, reader.peek(1) != "self");
            reader.pass_group("(", ")");
        }
        let scope: Vec<String> = braces.iter().flatten().cloned().collect();
        if reader.peek(0) == "mod" && matches!(reader.peek(2), "{" | ";") {
            let name = reader.peek(1).to_owned();
            reader.at += 2;
            if reader.take("{") {
                braces.push(Some(name.clone()));
            }
            if is_visible {
                let kind = DeclarationKind::Module(name);
                found.push(Declaration { line, scope, is_public, kind });
            }
        } else if is_visible && reader.take("use") {
            let mut leaves = Vec::new();
            reader.leaves(&[], &mut leaves);
            found.extend(leaves.into_iter().map(|leaf| {
                let kind = DeclarationKind::Reexport(leaf);
                Declaration { line, scope: scope.clone(), is_public, kind }
            }));
        } else if reader.take("{") {
            braces.push(None);
        } else if reader.take("}") {
            braces.pop();
        } else if !has_visibility {
            reader.at += 1;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<String> {
        let line = |it: Declaration| {
            let visibility = if it.is_public { "pub" } else { "restricted" };
            let scope: String = it.scope.iter().map(|name| format!("{name}::")).collect();
            match it.kind {
                DeclarationKind::Module(name) => format!("{visibility} mod {scope}{name}"),
                DeclarationKind::Reexport(path) => {
                    format!("{visibility} use {scope}[{}]", path.join("::"))
                }
            }
        };
        declarations(text).into_iter().map(line).collect()
    }

    #[test]
    fn declarations_are_read_in_any_layout() {
        let text = r##"
            #[cfg(any(test, feature = "fuzzing"))] pub mod a;
            #[path = "pub mod no;"] pub(crate) mod b;
            pub mod r#move; mod private; pub(self) mod own;
            pub use self::{
                a::{self, B as C, d::*}, // pub use x::Y;
                r#move::E,
            };
            pub(super) use ::outside::F; use quiet::G;
        "##;
        let expected = [
            "pub mod a",
            "restricted mod b",
            "pub mod move",
            "pub use [self::a]",
            "pub use [self::a::B]",
            "pub use [self::a::d::*]",
            "pub use [self::move::E]",
            "restricted use [::outside::F]",
        ];
        assert_eq!(read(text), expected);
    }

    #[test]
    fn text_that_is_no_code_is_passed_over() {
        let text = concat!(
            "/* pub mod a; /* pub mod b; */ pub mod c; */ const Q: char = '\"'; // pub mod d;\n",
            "const R: &str = \"\\\" pub mod e;\"; fn f<'a>(it: &'a str) -> char { '\\'' }\n",
            "const S: &str = r#\"\" pub mod g;\"#; const T: &[u8] = br\"\\\"; pub mod real;"
        );
        assert_eq!(read(text), ["pub mod real"]);
        assert_eq!(declarations(text)[0].line, 3);
    }

    #[test]
    fn inline_modules_are_scopes() {
        let text =
            "impl A { pub fn mod_(&self) {} } pub mod a { pub mod b; pub use b::C; } pub use a::D;";
        let expected = ["pub mod a", "pub mod a::b", "pub use a::[b::C]", "pub use [a::D]"];
        assert_eq!(read(text), expected);
    }
}
