//! The main figures as a picture for the README.

use std::fmt::Write;
use std::fs;

use crate::report::Report;

const WIDTH: f64 = 760.0;
const LABEL: f64 = 250.0;
const ROW: f64 = 24.0;

/// Draws the time from a release to the entry of a waiter in another process. The scale is logarithmic: the libraries
/// differ by orders of magnitude.
pub(crate) fn draw(report: &Report) {
    let prefix = "to one that waits, p50: ";
    let bars: Vec<(&str, f64)> = report
        .figures
        .iter()
        .filter(|figure| figure.scenario == "handoff")
        .filter_map(|figure| Some((figure.what.strip_prefix(prefix)?, figure.value)))
        .collect();
    if bars.len() < 2 {
        return;
    }
    let least = bars.iter().map(|(_, micros)| *micros).fold(f64::MAX, f64::min) / 2.0;
    let most = bars.iter().map(|(_, micros)| *micros).fold(0.0, f64::max);
    let height = 60.0 + ROW * bars.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <style>text {{ fill: #24292f }} .bar {{ fill: #8c959f }} .ours {{ fill: #1a7f37 }}\n\
         @media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} .bar {{ fill: #6e7681 }} .ours {{ fill: #3fb950 }} }}</style>\n\
         <text x=\"8\" y=\"22\" font-weight=\"bold\">From the release to the entry of the one that waits, median (log scale)</text>\n"
    );
    for (n, (name, micros)) in bars.iter().enumerate() {
        let y = 44.0 + ROW * n as f64;
        let length = (micros / least).ln() / (most / least).ln() * (WIDTH - LABEL - 110.0);
        let class = if name.starts_with('#') { "ours" } else { "bar" };
        let value = match *micros {
            micros if micros >= 1000.0 => format!("{:.1} ms", micros / 1000.0),
            micros => format!("{micros:.0} µs"),
        };
        let end = LABEL + length + 8.0;
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{name}</text>\
             <rect class=\"{class}\" x=\"{LABEL}\" y=\"{y}\" width=\"{length:.0}\" height=\"16\" rx=\"2\"/>\
             <text x=\"{end:.0}\" y=\"{}\">{value}</text>",
            LABEL - 8.0,
            y + 13.0,
            y + 13.0,
        );
    }
    svg.push_str("</svg>\n");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/results.svg");
    fs::write(path, svg).expect("the chart can be written");
}
