//! On a logarithmic axis, as SVG: cumulative distributions, and rows of dots.

use std::fmt::Write;

/// Values in rising order.
pub(crate) struct Curve<'a> {
    pub(crate) name: &'a str,
    pub(crate) sorted: &'a [f64],
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 130.0;
const TOP: f64 = 16.0;
const BOTTOM: f64 = 44.0;
const COLOURS: [&str; 6] = ["#888888", "#b8860b", "#2e8b57", "#4169e1", "#8a2be2", "#c0392b"];
/// Points of one curve.
const POINTS: usize = 200;

/// The share of values (up) that are at most so much (right).
pub(crate) fn distribution(label: &str, curves: &[Curve<'_>]) -> String {
    let values = || curves.iter().flat_map(|curve| curve.sorted).filter(|value| **value > 0.0);
    let least = values().copied().fold(f64::INFINITY, f64::min).min(1e9);
    let most = values().copied().fold(0.0, f64::max).max(least * 10.0);
    let (from, to) = (least.log10().floor(), most.log10().ceil());
    let x = |value: f64| {
        let share = (value.max(least).log10() - from) / (to - from);
        LEFT + share * (WIDTH - LEFT - RIGHT)
    };
    let y = |share: f64| HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    for decade in from as i32..=to as i32 {
        let at = x(10f64.powi(decade));
        line(&mut svg, (at, y(0.0)), (at, y(1.0)));
        text(&mut svg, (at, y(0.0) + 16.0), "middle", &format!("{}", 10f64.powi(decade)));
    }
    for tenths in (0..=10).step_by(2) {
        let share = f64::from(tenths) / 10.0;
        line(&mut svg, (LEFT, y(share)), (WIDTH - RIGHT, y(share)));
        text(&mut svg, (LEFT - 6.0, y(share) + 4.0), "end", &format!("{share:.1}"));
    }
    text(&mut svg, ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 8.0), "middle", label);
    for (number, curve) in curves.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let mut points = String::new();
        for point in 0..=POINTS.min(curve.sorted.len().saturating_sub(1)) {
            let share = point as f64 / POINTS.min(curve.sorted.len()).max(1) as f64;
            let at = (share * (curve.sorted.len() - 1) as f64) as usize;
            let _ = write!(points, "{:.1},{:.1} ", x(curve.sorted[at]), y(share));
        }
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\" points=\"{}\"/>",
            points.trim_end()
        );
        let at = TOP + 14.0 + 18.0 * number as f64;
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{at}\" fill=\"{colour}\">{}</text>",
            WIDTH - RIGHT + 10.0,
            curve.name
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// One thing that was measured in several ways.
#[derive(Debug)]
pub struct Row {
    pub label: String,
    /// One for each of the names.
    pub marks: Vec<Mark>,
}

#[derive(Debug, Clone, Copy)]
pub struct Mark {
    pub value: f64,
    pub is_ringed: bool,
}

const LABEL: f64 = 210.0;
const ROW_HEIGHT: f64 = 22.0;

/// Rows from top to bottom, each with a dot of its colour for every name.
pub fn rows(label: &str, names: &[&str], rows: &[Row]) -> String {
    let values = || rows.iter().flat_map(|row| &row.marks).map(|mark| mark.value);
    let values = || values().filter(|value| value.is_finite() && *value > 0.0);
    let least = values().fold(f64::INFINITY, f64::min).min(1e9);
    let most = values().fold(0.0, f64::max).max(least);
    let from = least.log10().floor();
    let to = most.log10().ceil().max(from + 1.0);
    let x = |value: f64| {
        LABEL + (value.max(least).log10() - from) / (to - from) * (WIDTH - LABEL - RIGHT)
    };
    let height = TOP + BOTTOM + ROW_HEIGHT * rows.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for decade in from as i32..=to as i32 {
        let at = x(10f64.powi(decade));
        line(&mut svg, (at, TOP), (at, height - BOTTOM));
        text(&mut svg, (at, height - BOTTOM + 16.0), "middle", &format!("{}", 10f64.powi(decade)));
    }
    text(&mut svg, ((LABEL + WIDTH - RIGHT) / 2.0, height - 8.0), "middle", label);
    let mut circle = |at: (f64, f64), radius: f64, paint: &str| {
        let (x, y) = at;
        let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" {paint}/>");
    };
    let colour = |at: usize| COLOURS[(2 + at) % COLOURS.len()];
    let middle = |at: usize| TOP + ROW_HEIGHT * (at as f64 + 0.5);
    for (at, row) in rows.iter().enumerate() {
        for (way, mark) in row.marks.iter().enumerate() {
            let place = (x(mark.value), middle(at));
            circle(place, 4.5, &format!("fill=\"{}\"", colour(way)));
            if mark.is_ringed {
                circle(place, 8.0, "fill=\"none\" stroke=\"#333333\"");
            }
        }
    }
    for way in 0..names.len() {
        circle((WIDTH - RIGHT + 14.0, middle(way)), 4.5, &format!("fill=\"{}\"", colour(way)));
    }
    for (at, row) in rows.iter().enumerate() {
        text(&mut svg, (LABEL - 8.0, middle(at) + 4.0), "end", &row.label);
    }
    for (way, name) in names.iter().enumerate() {
        text(&mut svg, (WIDTH - RIGHT + 24.0, middle(way) + 4.0), "start", name);
    }
    svg.push_str("</svg>\n");
    svg
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64)) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = writeln!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#dddddd\"/>"
    );
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    let _ =
        writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>");
}
