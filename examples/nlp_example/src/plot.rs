//! The loss curve as a picture: training loss per step, accuracy on the development split per epoch.

use plotters::coord::Shift;
use plotters::prelude::*;

const LOSS: RGBColor = RGBColor(31, 119, 180);
const ACCURACY: RGBColor = RGBColor(214, 39, 40);
const SIZE: (u32, u32) = (960, 540);

/// What happened during training, in the order it happened.
///
/// ```
/// use nlp_example::plot::History;
///
/// let mut history = History::default();
/// for step in 0..100 {
///     history.losses.push(0.7 - 0.005 * f64::from(step));
/// }
/// history.accuracies.push((100, 0.86));
/// let svg = history.to_svg("bert on reviews")?;
/// assert!(svg.starts_with("<svg") && svg.contains("bert on reviews"));
/// # Ok::<(), nlp_example::plot::PlotError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct History {
    /// Mean training loss of each optimizer step, from step 1 on. Values that are not finite leave gaps.
    pub losses: Vec<f64>,
    /// `(number of steps done, accuracy on the development split)`, one for each evaluation.
    pub accuracies: Vec<(usize, f64)>,
}

/// The picture could not be drawn.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// The plotting library gave up.
    #[error("cannot draw the loss curve: {0}")]
    Drawing(String),
}

impl History {
    /// Draws the curve: the loss of each step thin, its running mean bold (left axis), and the accuracies as
    /// dots (right axis).
    ///
    /// # Errors
    /// When the plotting library cannot draw.
    pub fn to_svg(&self, title: &str) -> Result<String, PlotError> {
        let mut svg = String::new();
        {
            let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            self.draw(&area, title).map_err(|error| PlotError::Drawing(error.to_string()))?;
            area.present().map_err(|error| PlotError::Drawing(error.to_string()))?;
        }
        Ok(svg)
    }

    /// Long because a chart is one list of settings, read from top to bottom.
    fn draw<'a>(
        &self,
        area: &DrawingArea<SVGBackend<'a>, Shift>,
        title: &str,
    ) -> Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>> {
        let num_steps = self.losses.len().max(1) as f64;
        let raw: Vec<(f64, f64)> = (1..).zip(&self.losses).map(|(step, &loss)| (f64::from(step), loss)).collect();
        let raw: Vec<_> = raw.into_iter().filter(|(_, loss)| loss.is_finite()).collect();
        let largest = raw.iter().map(|&(_, loss)| loss).fold(0.1, f64::max);

        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(area)
            .caption(title, ("sans-serif", 22))
            .margin(14)
            .x_label_area_size(48)
            .y_label_area_size(64)
            .right_y_label_area_size(64)
            .build_cartesian_2d(0.0..num_steps, 0.0..largest * 1.05)?
            .set_secondary_coord(0.0..num_steps, 0.0..1.0);
        chart
            .configure_mesh()
            .x_desc("optimizer step")
            .y_desc("training loss")
            .x_label_formatter(&|step| format!("{step:.0}"))
            .y_label_formatter(&|loss| format!("{loss:.2}"))
            .axis_desc_style(("sans-serif", 16))
            .label_style(("sans-serif", 13))
            .light_line_style(BLACK.mix(0.04))
            .bold_line_style(BLACK.mix(0.12))
            .draw()?;
        chart
            .configure_secondary_axes()
            .y_desc("accuracy on the development split")
            .y_label_formatter(&|accuracy| format!("{accuracy:.1}"))
            .axis_desc_style(("sans-serif", 16))
            .label_style(("sans-serif", 13))
            .draw()?;

        let smooth = running_mean(&raw);
        chart
            .draw_series(LineSeries::new(raw, LOSS.mix(0.3).stroke_width(1)))?
            .label("loss of each step")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], LOSS.mix(0.3).stroke_width(1)));
        chart
            .draw_series(LineSeries::new(smooth, LOSS.stroke_width(3)))?
            .label("running mean of the loss")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], LOSS.stroke_width(3)));
        let points = || self.accuracies.iter().map(|&(step, accuracy)| (step as f64, accuracy));
        chart.draw_secondary_series(LineSeries::new(points(), ACCURACY.stroke_width(1)))?;
        chart
            .draw_secondary_series(points().map(|point| Circle::new(point, 5, ACCURACY.filled())))?
            .label("accuracy (right axis)")
            .legend(|(x, y)| Circle::new((x + 9, y), 5, ACCURACY.filled()));
        chart.draw_secondary_series(points().map(|(step, accuracy)| {
            Text::new(format!("{:.1} %", 100.0 * accuracy), (step, accuracy), ("sans-serif", 13).into_font())
        }))?;
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerLeft)
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.3))
            .label_font(("sans-serif", 14))
            .draw()
    }
}

/// Mean over a window of a twentieth of the run around each step, narrower at both ends.
fn running_mean(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let half = (points.len() / 40).max(1);
    points
        .iter()
        .enumerate()
        .map(|(index, &(step, _))| {
            let window = &points[index.saturating_sub(half)..(index + half + 1).min(points.len())];
            (step, window.iter().map(|(_, loss)| loss).sum::<f64>() / window.len() as f64)
        })
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_the_picture_is_labelled() {
        let losses = (0..200).map(|step| 1.0 / (1.0 + f64::from(step) / 50.0)).collect();
        let svg = History { losses, accuracies: vec![(100, 0.75), (200, 0.912)] }.to_svg("a <title>").unwrap();
        let wanted = ["a &lt;title&gt;", "optimizer step", "training loss", "running mean", "75.0 %", "91.2 %"];
        for text in wanted {
            assert!(svg.contains(text), "the picture lacks {text:?}");
        }
        assert_eq!(svg.matches("<circle").count(), 3, "two evaluations and the legend");
    }

    #[test]
    fn a_run_without_steps_or_with_bad_losses_is_drawn_too() {
        for losses in [vec![], vec![0.5], vec![f64::NAN, f64::INFINITY, 0.5], vec![0.0; 3]] {
            let svg = History { losses, accuracies: vec![] }.to_svg("short").unwrap();
            assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
        }
    }

    #[test]
    fn running_mean_follows_the_mean_of_the_window() {
        let points: Vec<_> = [1.0, 2.0, 6.0, 3.0].iter().enumerate().map(|(x, &y)| (x as f64, y)).collect();
        let means: Vec<f64> = running_mean(&points).into_iter().map(|(_, mean)| mean).collect();
        assert_eq!(means, [1.5, 3.0, 11.0 / 3.0, 4.5]);
    }
}
