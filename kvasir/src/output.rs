//! What the program says to the person who started it: results and progress on standard output,
//! complaints on standard error. A reader that has gone away (a closed pipe) never ends a cluster,
//! so failures to write are ignored here and nowhere else.

use std::error::Error;
use std::io::Write;

/// A line of progress or of a result.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Text as it is, without a line end of its own.
pub(crate) fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

pub(crate) fn complain(sentence: &str) {
    let _ = writeln!(std::io::stderr().lock(), "kvasir: {sentence}");
}

/// An error and its causes as one sentence; a cause that its effect already quotes is left out.
pub(crate) fn sentence(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let words = inner.to_string();
        if !text.contains(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] Inner);

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Inner(&'static str);

    #[test]
    fn causes_are_joined_and_not_said_twice() {
        assert_eq!(sentence(&Outer(Inner("the reason"))), "outer: the reason");
        assert_eq!(sentence(&Outer(Inner("out"))), "outer");
    }
}
