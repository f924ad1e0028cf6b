//! I8: never does an answer depend on where its cache came from.

use std::rc::Rc;

use super::Checker;
use crate::content::Truth;
use crate::seen::Seen;

#[derive(Debug)]
pub(super) struct Answers {
    truth: Rc<Truth>,
}

impl Answers {
    pub(super) fn new(truth: Rc<Truth>) -> Self {
        Answers { truth }
    }
}

impl Checker for Answers {
    fn name(&self) -> &'static str {
        "I8 answers"
    }

    fn see(&mut self, _now_us: u64, seen: &Seen) -> Result<(), String> {
        let Seen::Answered { request, tokens } = seen else { return Ok(()) };
        let expected = &self.truth.requests[*request].answer;
        if expected != tokens {
            return Err(format!("request {request} is answered {tokens:x?}, not {expected:x?}"));
        }
        Ok(())
    }
}
