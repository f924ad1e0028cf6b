//! Cumulative distributions on a logarithmic axis, as SVG.

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
