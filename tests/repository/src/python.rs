//! The strings of Python files.

/// A string literal, or adjacent literals that Python joins.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PythonString {
    pub line: usize,
    pub text: String,
    pub is_docstring: bool,
}

pub(crate) fn strings(source: &str) -> Vec<PythonString> {
    let mut found: Vec<PythonString> = Vec::new();
    let mut depth = 0_usize;
    let (mut begins_statement, mut follows_string) = (true, false);
    let mut at = 0;
    while let Some(next) = source[at..].chars().next() {
        let rest = &source[at..];
        let word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (prefix, after) = rest.split_at(word);
        if after.starts_with(['"', '\'']) && is_prefix(prefix) {
            let (body, length) = body(after);
            let text = if prefix.contains(['f', 'F']) { without_fields(body) } else { body.into() };
            let text = text.replace("\\\n", "").replace("\\n", "\n");
            match found.last_mut().filter(|_| follows_string) {
                Some(last) => last.text.push_str(&text),
                None => found.push(PythonString {
                    line: 1 + source[..at].matches('\n').count(),
                    text,
                    is_docstring: begins_statement && depth == 0,
                }),
            }
            (begins_statement, follows_string) = (false, true);
            at += word + length;
            continue;
        }
        match next {
            '#' => {
                at += rest.find('\n').unwrap_or(rest.len());
                continue;
            }
            '\\' => {
                at += "\\\n".len();
                continue;
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if next == '\n' && depth == 0 {
            (begins_statement, follows_string) = (true, false);
        } else if !next.is_whitespace() {
            (begins_statement, follows_string) = (false, false);
        }
        at += word.max(next.len_utf8());
    }
    found
}

fn is_prefix(word: &str) -> bool {
    word.len() <= 2 && word.chars().all(|c| "rRbBuUfF".contains(c))
}

/// The text of a literal that begins with its quote, and the length with both quotes.
fn body(literal: &str) -> (&str, usize) {
    let quote = ["\"\"\"", "'''"].into_iter().find(|quote| literal.starts_with(quote));
    let quote = quote.unwrap_or(&literal[..1]);
    let mut end = quote.len();
    while let Some(next) = literal[end..].chars().next() {
        if literal[end..].starts_with(quote) {
            return (&literal[quote.len()..end], end + quote.len());
        }
        let escaped = if next == '\\' { literal[end + 1..].chars().next() } else { None };
        end += next.len_utf8() + escaped.map_or(0, char::len_utf8);
    }
    (&literal[quote.len()..], literal.len())
}

/// The text of a format string. A `0` stands for each expression, as for a code span of a document.
fn without_fields(text: &str) -> String {
    let mut bare = String::new();
    let mut depth = 0_usize;
    for c in text.chars() {
        match c {
            '{' => {
                bare.push_str(if depth == 0 { "0" } else { "" });
                depth += 1;
            }
            '}' => depth = depth.saturating_sub(1),
            _ if depth == 0 => bare.push(c),
            _ => {}
        }
    }
    bare
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str, is_docstring: bool) -> Vec<String> {
        let of_kind = |one: &PythonString| one.is_docstring == is_docstring;
        strings(source).into_iter().filter(of_kind).map(|one| one.text).collect()
    }

    #[test]
    fn docstrings_and_other_strings_are_told_apart() {
        let source = "'''Head.'''\nx = {\n    'key': \"a # b\",  # 'aside'\n}\ndef f():\n    \"\"\"One.\n    Two.\"\"\"\n";
        assert_eq!(texts(source, true), ["Head.", "One.\n    Two."]);
        assert_eq!(texts(source, false), ["key", "a # b"]);
        let lines: Vec<usize> = strings(source).into_iter().map(|one| one.line).collect();
        assert_eq!(lines, [1, 3, 3, 6]);
    }

    #[test]
    fn adjacent_strings_are_joined_and_fields_are_code() {
        let source = "raise E(\n    'it\\'s a '  # why\n    f\"{x[1]} b\"\n)\nerror = rb'\\d'\nprint(a, 'b' + 'c')\n";
        assert_eq!(texts(source, false), ["it\\'s a 0 b", "\\d", "b", "c"]);
        assert_eq!(texts("x = 'never ends", false), ["never ends"]);
    }
}
