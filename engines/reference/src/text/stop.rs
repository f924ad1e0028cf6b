//! Stop strings in a stream of text. Where the text was cut into pieces does not matter: the stop
//! string that is complete first ends the answer, and of those that end at one place the longest.
//! Text that could be the beginning of a stop string is held back.

use super::Piece;

/// The stop strings of one request. None is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StopStrings {
    pub strings: Vec<String>,
    /// The stop string is part of the answer.
    pub include_in_output: bool,
}

/// Looks for stop strings. Nothing may be pushed after one was matched.
#[derive(Debug)]
pub(crate) struct StopMatcher {
    stop: StopStrings,
    /// Text that could be the beginning of a stop string; shorter than the longest one.
    held: String,
}

impl StopMatcher {
    /// Panics when a stop string is empty: the request was checked before.
    pub(crate) fn new(stop: StopStrings) -> Self {
        assert!(stop.strings.iter().all(|text| !text.is_empty()), "an empty stop string");
        StopMatcher { stop, held: String::new() }
    }

    /// Adds text; gives what is settled.
    pub(crate) fn push(&mut self, text: &str) -> Piece {
        self.held.push_str(text);
        if let Some((start, stop)) = self.first_match() {
            let end = if self.stop.include_in_output { start + stop.len() } else { start };
            self.held.truncate(end);
            return Piece { text: std::mem::take(&mut self.held), stopped_by: Some(stop) };
        }
        let settled = self.held.len() - self.beginning_of_a_stop();
        let held = self.held.split_off(settled);
        Piece { text: std::mem::replace(&mut self.held, held), stopped_by: None }
    }

    /// The text ends here: it was no beginning of a stop string.
    pub(crate) fn take_held(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    fn first_match(&self) -> Option<(usize, String)> {
        let found = |stop: &String| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, stop.clone()))
        };
        let (_, start, stop) = self.stop.strings.iter().filter_map(found).min()?;
        Some((start, stop))
    }

    /// Bytes at the end of the text that could become a stop string.
    fn beginning_of_a_stop(&self) -> usize {
        let text = self.held.as_bytes();
        let overlap = |stop: &String| {
            let longest = text.len().min(stop.len() - 1);
            (1..=longest).rev().find(|&bytes| text.ends_with(&stop.as_bytes()[..bytes]))
        };
        self.stop.strings.iter().filter_map(overlap).max().unwrap_or(0)
    }
}
