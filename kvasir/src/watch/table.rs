//! Columns of text, each as wide as what stands in it.

/// How a column is aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Align {
    Left,
    Right,
}

/// Rows under a head, two spaces between columns; no space at the ends of lines. What comes from
/// outside is shown without control characters.
pub(super) fn table(head: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<String>> =
        rows.iter().map(|row| row.iter().map(|cell| plain(cell)).collect()).collect();
    let wide = |at: usize, name: &str| {
        let cells = rows.iter().filter_map(|row| row.get(at));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0).max(name.chars().count())
    };
    let widths: Vec<usize> =
        head.iter().enumerate().map(|(at, (name, _))| wide(at, name)).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let columns = cells.zip(head).zip(&widths).map(|((cell, (_, align)), width)| match align {
            Align::Left => format!("{cell:<width$}"),
            Align::Right => format!("{cell:>width$}"),
        });
        columns.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut head.iter().map(|(name, _)| *name));
    for row in &rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

/// Without characters that a terminal would obey.
pub(super) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_obey_nothing() {
        let head = [("name", Align::Left), ("n", Align::Right)];
        let rows = [vec!["a".into(), "10".into()], vec!["\x1b[2Jx".into(), "9".into()]];
        assert_eq!(table(&head, &rows), "name    n\na      10\n\u{fffd}[2Jx   9\n");
    }
}
