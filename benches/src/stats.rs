//! Medians and percentiles.

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    percentile(&mut values, 50.0)
}

/// NaN if there are no values.
pub(crate) fn percentile(values: &mut [f64], percent: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    if values.is_empty() {
        return f64::NAN;
    }
    let last = values.len() - 1;
    let at = (percent / 100.0 * last as f64).round();
    values[(at as usize).min(last)]
}

/// Smallest over largest; 1 is perfectly even.
pub(crate) fn evenness(counts: &[usize]) -> f64 {
    let (least, most) = (counts.iter().min(), counts.iter().max());
    match (least, most) {
        (Some(&least), Some(&most)) if most > 0 => least as f64 / most as f64,
        _ => f64::NAN,
    }
}
