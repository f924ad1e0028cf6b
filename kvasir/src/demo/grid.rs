//! What is varied: how nodes reach each other, how long the document and the answers are, how many agents ask.

use std::str::FromStr;

use super::{AgentsFlags, ENGINES};
use crate::up::flags::parse_bytes;

/// Tokens of each agent's question. A block has 64, so that something of every prompt is computed.
pub(super) const QUESTION_TOKENS: u32 = 24;
/// The model's context, less a question.
const TOKENS_MAX: u32 = 4_096 - QUESTION_TOKENS;
const AGENTS_MAX: u32 = 64;

/// How nodes reach each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wire {
    pub name: String,
    domain: &'static str,
    bytes_per_s: Option<u64>,
}

impl FromStr for Wire {
    type Err = String;

    fn from_str(text: &str) -> Result<Wire, String> {
        let (domain, bytes_per_s) = match text.split_once(':') {
            Some(("tcp", size)) => ("tcp", Some(parse_bytes(size)?)),
            None if text == "tcp" => ("tcp", None),
            None if text == "shm" => ("shm", None),
            _ => return Err("use shm, tcp, or tcp with a rate, as in tcp:20MiB".to_owned()),
        };
        if bytes_per_s.is_some_and(|rate| rate < 1 << 20) {
            return Err("the rate must be at least 1MiB per second".to_owned());
        }
        Ok(Wire { name: text.to_owned(), domain, bytes_per_s })
    }
}

impl Wire {
    /// The line of `up` for a cluster over it. No objective is in the way of what is measured by force.
    pub(super) fn cluster_flags(&self) -> Vec<String> {
        let mut line = vec!["up".to_owned()];
        line.extend(
            // Copies to where the next way is measured would be that way's already.
            ["--port", "0", "--routes", "--steering", "--dram-bytes", "192MiB", "--no-replication"]
                .map(str::to_owned),
        );
        line.extend(["--both".to_owned(), ENGINES.to_string()]);
        line.extend(["--transport".to_owned(), self.domain.to_owned()]);
        line.extend(
            ["--ttft-objective-ms", "600000", "--tbt-objective-ms", "600000"].map(str::to_owned),
        );
        line.extend(["--route-timeout-ms", "60000"].map(str::to_owned));
        if let Some(rate) = self.bytes_per_s {
            line.extend(["--send-bytes-per-s-max".to_owned(), rate.to_string()]);
        }
        line
    }
}

/// One combination.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    pub wire: String,
    pub document_tokens: u32,
    pub agents: u32,
    pub generated_tokens: u32,
}

#[derive(Debug)]
pub(super) struct Grid {
    pub wires: Vec<Wire>,
    documents: Vec<u32>,
    agents: Vec<u32>,
    answers: Vec<u32>,
    pub repeat: u32,
    /// Of each wire.
    pub cells: usize,
}

impl Grid {
    /// # Errors
    /// A sentence about what cannot be measured.
    pub(super) fn of(flags: &AgentsFlags) -> Result<Grid, String> {
        let wires = ["shm", "tcp", "tcp:20MiB"].map(|wire| wire.parse::<Wire>());
        let wires = wires.into_iter().collect::<Result<Vec<Wire>, String>>()?;
        let or = |asked: &[u32], quick: &[u32], full: &[u32]| match (asked, flags.quick) {
            ([], true) => quick.to_vec(),
            ([], false) => full.to_vec(),
            (asked, _) => asked.to_vec(),
        };
        let grid = Grid {
            wires: match (&flags.transport[..], flags.quick) {
                ([], true) => vec![wires[0].clone(), wires[2].clone()],
                ([], false) => wires,
                (asked, _) => asked.to_vec(),
            },
            documents: or(&flags.document, &[192], &[256, 1_920]),
            agents: or(&flags.agents, &[2], &[1, 4]),
            answers: or(&flags.answer, &[4, 24], &[8, 128]),
            repeat: flags.repeat.unwrap_or(if flags.quick { 1 } else { 3 }),
            cells: 0,
        };
        grid.check()?;
        let cells = grid.documents.len() * grid.agents.len() * grid.answers.len();
        Ok(Grid { cells, ..grid })
    }

    fn check(&self) -> Result<(), String> {
        let all = |values: &[u32], flag: &str, range: std::ops::RangeInclusive<u32>| match values
            .iter()
            .find(|value| !range.contains(value))
        {
            Some(value) => {
                let (low, high) = (range.start(), range.end());
                Err(format!("--{flag} {value} is out of range; use {low} to {high}"))
            }
            None => Ok(()),
        };
        all(&self.documents, "document", 64..=TOKENS_MAX)?;
        all(&self.agents, "agents", 1..=AGENTS_MAX)?;
        all(&self.answers, "answer", 1..=TOKENS_MAX)?;
        all(&[self.repeat], "repeat", 1..=100)?;
        let longest = |values: &[u32]| values.iter().copied().max().unwrap_or(0);
        let tokens = longest(&self.documents) + longest(&self.answers);
        if tokens > TOKENS_MAX {
            return Err(format!(
                "the longest document and the longest answer have {tokens} tokens together, but the model's \
                 context has room for only {TOKENS_MAX}; use a smaller --document or --answer"
            ));
        }
        Ok(())
    }

    pub(super) fn cells_of(&self, wire: &Wire) -> Vec<Cell> {
        let mut cells = Vec::with_capacity(self.cells);
        for &document_tokens in &self.documents {
            for &agents in &self.agents {
                for &generated_tokens in &self.answers {
                    let wire = wire.name.clone();
                    cells.push(Cell { wire, document_tokens, agents, generated_tokens });
                }
            }
        }
        cells
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        flags: AgentsFlags,
    }

    fn grid(line: &str) -> Result<Grid, String> {
        let words = std::iter::once("agents").chain(line.split_whitespace());
        Grid::of(&Line::try_parse_from(words).map_err(|error| error.to_string())?.flags)
    }

    #[test]
    fn a_grid_is_every_combination_of_what_was_asked_for() {
        let asked =
            grid("--transport tcp:20MiB --document 64,128 --agents 1,2,3 --answer 5").unwrap();
        assert_eq!((asked.wires.len(), asked.cells, asked.repeat), (1, 6, 3));
        let cells = asked.cells_of(&asked.wires[0]);
        let shape = |cell: &Cell| (cell.document_tokens, cell.agents, cell.generated_tokens);
        let want = [(64, 1, 5), (64, 2, 5), (64, 3, 5), (128, 1, 5), (128, 2, 5), (128, 3, 5)];
        assert_eq!(cells.iter().map(shape).collect::<Vec<_>>(), want);
        let flags = asked.wires[0].cluster_flags().join(" ");
        assert!(
            flags.contains("--transport tcp") && flags.ends_with("--send-bytes-per-s-max 20971520")
        );
        assert_eq!((grid("").unwrap().cells, grid("--quick").unwrap().cells), (8, 2));
        assert_eq!(grid("--quick").unwrap().repeat, 1);
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for line in [
            "--transport verbs",
            "--transport shm:1GiB",
            "--transport tcp:1KiB",
            "--document 63",
            "--document 4073",
            "--document 4000 --answer 73",
            "--agents 0",
            "--agents 65",
            "--answer 0",
            "--repeat 0",
        ] {
            assert!(grid(line).is_err(), "{line}");
        }
    }
}
