//! As SVG: cumulative distributions, lines over sizes and rows of dots on a logarithmic axis, and bars.

use std::fmt::Write;

/// Values in rising order.
pub(crate) struct Curve<'a> {
    pub(crate) name: String,
    pub(crate) sorted: &'a [f64],
}

const WIDTH: f64 = 790.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 200.0;
const TOP: f64 = 16.0;
const BOTTOM: f64 = 44.0;
const COLOURS: [&str; 6] = ["#888888", "#b8860b", "#2e8b57", "#4169e1", "#8a2be2", "#c0392b"];
const NAME_HEIGHT: f64 = 18.0;
/// Points of one curve.
const POINTS: usize = 200;

/// One of the drawings that are on a page, one below the other.
pub(crate) struct Panel {
    height: f64,
    svg: String,
}

/// A whole SVG.
pub(crate) fn page(panels: &[Panel]) -> String {
    let height: f64 = panels.iter().map(|panel| panel.height).sum();
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    let mut top = 0.0;
    for panel in panels {
        let _ = writeln!(svg, "<g transform=\"translate(0 {top})\">\n{}</g>", panel.svg);
        top += panel.height;
    }
    svg.push_str("</svg>\n");
    svg
}

/// High enough for its names.
fn height_for(names: usize) -> f64 {
    (TOP + BOTTOM + NAME_HEIGHT * names as f64).max(HEIGHT)
}

/// The colour of a curve and how it is dashed: each pair once.
fn stroke(number: usize) -> (&'static str, &'static str) {
    let dashes = ["", "6 3", "2 2", "8 2 2 2"];
    (COLOURS[number % COLOURS.len()], dashes[number / COLOURS.len() % dashes.len()])
}

fn polyline(svg: &mut String, number: usize, points: impl Iterator<Item = (f64, f64)>) {
    let (colour, dashes) = stroke(number);
    let points: Vec<String> = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(
        svg,
        "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\" \
         stroke-dasharray=\"{dashes}\" points=\"{}\"/>",
        points.join(" ")
    );
}

/// Beside the drawing, with a piece of its curve.
fn named_curve(svg: &mut String, number: usize, name: &str) {
    let (colour, _) = stroke(number);
    let (x, y) = (WIDTH - RIGHT + 10.0, TOP + NAME_HEIGHT * number as f64 + 10.0);
    polyline(svg, number, [(x, y), (x + 20.0, y)].into_iter());
    let _ =
        writeln!(svg, "<text x=\"{}\" y=\"{}\" fill=\"{colour}\">{name}</text>", x + 26.0, y + 4.0);
}

/// The share of values (up) that are at most so much (right).
pub(crate) fn distribution(label: &str, curves: &[Curve<'_>]) -> Panel {
    let height = height_for(curves.len());
    let values = curves.iter().flat_map(|curve| curve.sorted).filter(|value| **value > 0.0);
    let axis = Decades::over(LEFT, values.copied());
    let y = |share: f64| height - BOTTOM - share * (height - TOP - BOTTOM);
    let mut svg = String::new();
    axis.draw(&mut svg, height, label);
    shares(&mut svg, y);
    for (number, curve) in curves.iter().enumerate() {
        if let Some(last) = curve.sorted.len().checked_sub(1) {
            let steps = POINTS.min(last);
            let points = (0..=steps).map(|point| {
                let share = if steps == 0 { 1.0 } else { point as f64 / steps as f64 };
                (axis.x(curve.sorted[(share * last as f64) as usize]), y(share))
            });
            polyline(&mut svg, number, points);
        }
        named_curve(&mut svg, number, &curve.name);
    }
    Panel { height, svg }
}

/// Shares (up) over sizes (right).
pub(crate) fn lines(label: &str, lines: &[(String, Vec<(f64, f64)>)]) -> Panel {
    let height = height_for(lines.len());
    let sizes = lines.iter().flat_map(|(_, points)| points).map(|(size, _)| *size);
    let axis = Decades::over(LEFT, sizes.filter(|size| *size > 0.0));
    let y = |share: f64| height - BOTTOM - share * (height - TOP - BOTTOM);
    let mut svg = String::new();
    axis.draw(&mut svg, height, label);
    shares(&mut svg, y);
    for (number, (name, points)) in lines.iter().enumerate() {
        polyline(&mut svg, number, points.iter().map(|(size, share)| (axis.x(*size), y(*share))));
        named_curve(&mut svg, number, name);
    }
    Panel { height, svg }
}

/// One bar below the other, each with its name and its value as it is written.
pub(crate) fn bars(label: &str, bars: &[(String, f64, String)]) -> Panel {
    let height = TOP + BOTTOM + ROW_HEIGHT * bars.len() as f64;
    let most = bars.iter().fold(0.0, |most: f64, (_, value, _)| most.max(*value));
    let mut svg = String::new();
    for (number, (name, value, written)) in bars.iter().enumerate() {
        let top = TOP + ROW_HEIGHT * number as f64;
        let share = if most > 0.0 { value / most } else { 0.0 };
        let width = share * (WIDTH - LABEL - RIGHT);
        let (colour, _) = stroke(number);
        text(&mut svg, (LABEL - 8.0, top + 15.0), "end", name);
        let _ = writeln!(
            svg,
            "<rect x=\"{LABEL}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"14\" fill=\"{colour}\"/>",
            top + 4.0
        );
        text(&mut svg, (LABEL + width + 8.0, top + 15.0), "start", written);
    }
    text(&mut svg, ((LABEL + WIDTH - RIGHT) / 2.0, height - 16.0), "middle", label);
    Panel { height, svg }
}

/// A logarithmic axis from left to right over whole decades.
struct Decades {
    left: f64,
    from: f64,
    to: f64,
}

impl Decades {
    fn over(left: f64, values: impl Iterator<Item = f64> + Clone) -> Decades {
        let least = values.clone().fold(f64::INFINITY, f64::min).min(1e9);
        let most = values.fold(least, f64::max);
        let from = least.log10().floor();
        Decades { left, from, to: most.log10().ceil().max(from + 1.0) }
    }

    /// Whatever is less than the least is drawn there.
    fn x(&self, value: f64) -> f64 {
        let share = (value.max(10f64.powf(self.from)).log10() - self.from) / (self.to - self.from);
        self.left + share * (WIDTH - self.left - RIGHT)
    }

    fn draw(&self, svg: &mut String, height: f64, label: &str) {
        for decade in self.from as i32..=self.to as i32 {
            let at = self.x(10f64.powi(decade));
            line(svg, (at, TOP), (at, height - BOTTOM));
            let size = format!("{}", 10f64.powi(decade));
            text(svg, (at, height - BOTTOM + 16.0), "middle", &size);
        }
        text(svg, ((self.left + WIDTH - RIGHT) / 2.0, height - 8.0), "middle", label);
    }
}

/// The lines of an axis of shares.
fn shares(svg: &mut String, y: impl Fn(f64) -> f64) {
    for tenths in (0..=10).step_by(2) {
        let share = f64::from(tenths) / 10.0;
        line(svg, (LEFT, y(share)), (WIDTH - RIGHT, y(share)));
        text(svg, (LEFT - 6.0, y(share) + 4.0), "end", &format!("{share:.1}"));
    }
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

/// Rows from top to bottom, each with a dot of its colour for every name: a whole SVG.
pub fn rows(label: &str, names: &[&str], rows: &[Row]) -> String {
    let values = rows.iter().flat_map(|row| &row.marks).map(|mark| mark.value);
    let axis = Decades::over(LABEL, values.filter(|value| value.is_finite() && *value > 0.0));
    let height = TOP + BOTTOM + ROW_HEIGHT * rows.len() as f64;
    let mut svg = String::new();
    axis.draw(&mut svg, height, label);
    let mut circle = |at: (f64, f64), radius: f64, paint: &str| {
        let (x, y) = at;
        let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" {paint}/>");
    };
    let colour = |at: usize| COLOURS[(2 + at) % COLOURS.len()];
    let middle = |at: usize| TOP + ROW_HEIGHT * (at as f64 + 0.5);
    for (at, row) in rows.iter().enumerate() {
        for (way, mark) in row.marks.iter().enumerate() {
            let place = (axis.x(mark.value), middle(at));
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
    page(&[Panel { height, svg }])
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_values_is_drawn_without_a_curve() {
        let curves = [Curve { name: "all refused".to_owned(), sorted: &[] }];
        let nothing = [("nothing".to_owned(), 0.0, "0".to_owned())];
        let svg = page(&[
            distribution("s", &curves),
            lines("shares", &[("no pool".to_owned(), Vec::new())]),
            bars("requests", &nothing),
        ]);
        // Of each of the two a piece beside its name.
        assert_eq!(svg.matches("<polyline").count(), 3, "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn a_curve_goes_from_the_least_to_the_greatest_value() {
        let sorted: Vec<f64> = (1..=1_000).map(f64::from).collect();
        let curves = [Curve { name: "all".to_owned(), sorted: &sorted }];
        let svg = page(&[distribution("s", &curves)]);
        let bottom = HEIGHT - BOTTOM;
        assert!(svg.contains(&format!("points=\"{LEFT:.1},{bottom:.1} ")), "{svg}");
        assert!(svg.contains(&format!("{:.1},{TOP:.1}\"", WIDTH - RIGHT)), "{svg}");
    }
}
