//! What was measured, as a table, as a plot and as a JSON object.

use std::fmt::Write;

use kvasir_replay::plot::{self, Mark, Row};
use serde_json::{Value, json};

use super::asking::Way;
use super::measure::Measured;

/// How far from the best a decision may be that counts as right.
const RIGHT_WITHIN: f64 = 1.10;
/// How far the bytes of queries and partials may be from what follows from their rows.
const BYTES_WITHIN: f64 = 0.05;

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => values[length / 2],
        length => f64::midpoint(values[length / 2 - 1], values[length / 2]),
    }
}

/// One line while it runs.
pub(super) fn progress(measured: &Measured) -> String {
    let cell = &measured.cell;
    let [route, fetch, recompute] = measured.forced_ms;
    format!(
        "{}, document of {} tokens, {} agents, answers of {} tokens: route {route:.0} ms, fetch \
         {fetch:.0} ms, recompute {recompute:.0} ms; decision: {}",
        cell.wire,
        cell.document_tokens,
        cell.agents,
        cell.generated_tokens,
        decided(measured)
    )
}

/// The table and what follows from it, as Markdown.
pub(super) fn text(cells: &[Measured]) -> String {
    let mut text = String::from(
        "| transport | document tokens | agents | answer tokens | route ms | fetch ms | recompute ms | decision | decision ms | regret |\n\
         | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: |\n",
    );
    for measured in cells {
        let cell = &measured.cell;
        let best = measured.best();
        let ms = |way: Way| {
            let ms = measured.forced_ms[way as usize];
            if way == best { format!("**{ms:.1}**") } else { format!("{ms:.1}") }
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {:.1} | {:.2} |",
            cell.wire,
            cell.document_tokens,
            cell.agents,
            cell.generated_tokens,
            ms(Way::Route),
            ms(Way::Fetch),
            ms(Way::Recompute),
            decided(measured),
            measured.decided_ms,
            measured.regret(),
        );
    }
    let wins = wins(cells);
    let right = right(cells);
    let _ = write!(
        text,
        "\nTimes are milliseconds until the last agent has its answer; the shortest is bold. Regret is the time of the \
         decision divided by the shortest time.\n\
         Shortest: route in {} cases, fetch in {}, recompute in {}. Decision within {:.0} % of the shortest time in \
         {right} of {} cases.\n",
        wins[0],
        wins[1],
        wins[2],
        (RIGHT_WITHIN - 1.0) * 100.0,
        cells.len(),
    );
    let sum = |bytes: fn(&Measured) -> f64| cells.iter().map(bytes).sum::<f64>();
    let _ = write!(
        text,
        "Routed queries have {:.0} bytes, partials {:.0}; expected from rows x layers x steps: {:.0} and {:.0} (error at \
         most {:.2} %).\n\
         Transferred bytes of the cache: {:.0} by route, {:.0} by fetch.\n\
         All actions generated the same tokens in {} of {} cases.\n",
        sum(|cell| cell.routed.queries),
        sum(|cell| cell.routed.partials),
        sum(|cell| cell.expected.queries),
        sum(|cell| cell.expected.partials),
        cells.iter().map(Measured::bytes_off).fold(0.0, f64::max) * 100.0,
        sum(|cell| cell.routed.cached),
        sum(|cell| cell.fetched.cached),
        cells.iter().filter(|cell| cell.same_tokens).count(),
        cells.len(),
    );
    text
}

/// What must hold in every cell, whatever the machine.
pub(super) fn check(cells: &[Measured]) -> Result<(), String> {
    for measured in cells {
        let cell = &measured.cell;
        let (wire, tokens, agents) = (&cell.wire, cell.document_tokens, cell.agents);
        let at = format!("{wire}, {tokens} tokens, {agents} agents");
        if !measured.same_tokens {
            return Err(format!("{at}: the actions generated different tokens"));
        }
        if measured.bytes_off() > BYTES_WITHIN {
            return Err(format!(
                "{at}: the bytes of queries and partials differ from the expected bytes"
            ));
        }
        if measured.routed.cached > 0.0 {
            return Err(format!(
                "{at}: bytes of the cache were transferred although queries were routed"
            ));
        }
    }
    Ok(())
}

fn decided(measured: &Measured) -> String {
    match measured.chosen() {
        Some(way) => way.name().to_owned(),
        None => {
            let count = |way: Way| match measured.decided[way as usize] {
                0 => None,
                count => Some(format!("{} {count}", way.name())),
            };
            Way::ALL.into_iter().filter_map(count).collect::<Vec<_>>().join(", ")
        }
    }
}

/// In how many cells each alternative took least.
fn wins(cells: &[Measured]) -> [usize; 3] {
    Way::ALL.map(|way| cells.iter().filter(|cell| cell.best() == way).count())
}

fn right(cells: &[Measured]) -> usize {
    cells.iter().filter(|cell| cell.regret() <= RIGHT_WITHIN).count()
}

pub(super) fn json(cells: &[Measured]) -> Value {
    let by_way = |values: &dyn Fn(Way) -> Value| {
        let pairs = Way::ALL.map(|way| (way.name().to_owned(), values(way)));
        Value::Object(pairs.into_iter().collect())
    };
    let wins = wins(cells);
    let rows = cells.iter().map(|measured| {
        let cell = &measured.cell;
        json!({
            "transport": cell.wire,
            "document_tokens": cell.document_tokens,
            "agents": cell.agents,
            "generated_tokens": cell.generated_tokens,
            "measured_ms": by_way(&|way| json!(measured.forced_ms[way as usize])),
            "predicted_ms": by_way(&|way| json!(measured.predicted_ms[way as usize])),
            "decisions": by_way(&|way| json!(measured.decided[way as usize])),
            "action": measured.chosen().map(Way::name),
            "decision_ms": measured.decided_ms,
            "fastest": measured.best().name(),
            "regret": measured.regret(),
            "query_bytes": measured.routed.queries,
            "query_bytes_expected": measured.expected.queries,
            "partial_bytes": measured.routed.partials,
            "partial_bytes_expected": measured.expected.partials,
            "cache_bytes_routed": measured.routed.cached,
            "cache_bytes_fetched": measured.fetched.cached,
            "same_tokens": measured.same_tokens,
        })
    });
    json!({
        "scenarios": rows.collect::<Vec<_>>(),
        "fastest_counts": by_way(&|way| json!(wins[way as usize])),
        "within_10_percent": right(cells),
    })
}

/// All cells, one below the other: each alternative a dot, with a ring around what was decided.
pub(super) fn plot(cells: &[Measured]) -> String {
    let rows: Vec<Row> = cells
        .iter()
        .map(|measured| {
            let cell = &measured.cell;
            let marks = Way::ALL.map(|way| Mark {
                value: measured.forced_ms[way as usize],
                is_ringed: measured.decided[way as usize] > 0,
            });
            Row {
                label: format!(
                    "{}, {} tokens, {} × {}",
                    cell.wire, cell.document_tokens, cell.agents, cell.generated_tokens
                ),
                marks: marks.to_vec(),
            }
        })
        .collect();
    let names = Way::ALL.map(Way::name);
    plot::rows("ms until the last agent has its answer; a ring marks the decision", &names, &rows)
}

#[cfg(test)]
mod tests {
    use super::super::grid::Cell;
    use super::super::measure::Bytes;
    use super::*;

    fn measured(forced_ms: [f64; 3], decided: [u32; 3], decided_ms: f64) -> Measured {
        let cell = Cell { wire: "shm".into(), document_tokens: 64, agents: 2, generated_tokens: 4 };
        let bytes = Bytes { queries: 100.0, partials: 50.0, cached: 0.0 };
        Measured {
            cell,
            forced_ms,
            decided_ms,
            decided,
            predicted_ms: [None; 3],
            routed: bytes,
            expected: bytes,
            fetched: Bytes::default(),
            same_tokens: true,
        }
    }

    #[test]
    fn regret_is_of_what_was_decided_over_the_least() {
        let check = |decided, decided_ms, chosen, regret| {
            let measured = measured([20.0, 10.0, 40.0], decided, decided_ms);
            assert_eq!((measured.chosen(), measured.regret()), (chosen, regret));
            assert_eq!(measured.best(), Way::Fetch);
        };
        check([0, 2, 0], 99.0, Some(Way::Fetch), 1.0);
        check([2, 0, 0], 99.0, Some(Way::Route), 2.0);
        check([1, 1, 0], 15.0, None, 1.5);
    }

    #[test]
    fn what_must_hold_is_checked_in_every_cell() {
        let good = || measured([1.0, 2.0, 3.0], [2, 0, 0], 1.0);
        assert_eq!(check(&[good()]), Ok(()));
        let moved = Bytes { cached: 1.0, ..good().routed };
        let fewer = Bytes { queries: 94.0, ..good().routed };
        let other = Measured { same_tokens: false, ..good() };
        for bad in
            [Measured { routed: moved, ..good() }, Measured { routed: fewer, ..good() }, other]
        {
            assert!(check(&[good(), bad]).is_err());
        }
    }

    #[test]
    fn the_table_says_which_is_least_and_what_was_decided() {
        let cells =
            [measured([1.0, 2.0, 3.0], [2, 0, 0], 1.1), measured([9.0, 2.0, 3.0], [1, 1, 0], 5.0)];
        let said = text(&cells);
        assert!(
            said.contains("| shm | 64 | 2 | 4 | **1.0** | 2.0 | 3.0 | route | 1.1 | 1.00 |"),
            "{said}"
        );
        assert!(said.contains("| route 1, fetch 1 | 5.0 | 2.50 |"), "{said}");
        assert!(
            said.contains("Decision within 10 % of the shortest time in 1 of 2 cases."),
            "{said}"
        );
        let svg = plot(&cells);
        assert_eq!(svg.matches("<circle").count(), 6 + 3 + 3, "dots, rings and the legend");
    }
}
