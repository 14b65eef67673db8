//! When gradients are synchronised, and how losses are scaled, while gradients accumulate.
//!
//! A window is the run of micro-batches between two optimizer steps. The gradient that the optimizer sees
//! is the mean over the micro-batches that the window really had. The reference always divides by the
//! configured number, so the last window of an epoch is too small there (`Accelerator.backward`);
//! [`PartialWindow::Reference`] gives that number where a port needs it.

use crate::Result;
use crate::config::GradientAccumulationSettings;
use crate::names::spelled_enum;

/// What to do with the micro-batch at hand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// This micro-batch ends the window: the optimizer and the scheduler step, `zero_grad` clears.
    pub sync: bool,
    /// The backward pass of this micro-batch averages gradients over ranks. True at the end of the window,
    /// and always with `sync_each_batch`.
    pub reduce: bool,
    /// Multiply the loss of this micro-batch by this before its backward pass.
    pub loss_scale: f64,
    /// Multiply the gradients accumulated so far by this before the backward pass of this micro-batch.
    pub rescale_accumulated: Option<f64>,
    /// Micro-batches of the window so far, this one included.
    pub micro_batches: usize,
}

spelled_enum! {
    /// How a window that ends early, with the data loader, is scaled.
    ///
    /// ```
    /// use accelerate_core::accumulation::PartialWindow;
    /// assert_eq!(PartialWindow::default().to_string(), "true_mean");
    /// ```
    #[derive(Default)]
    PartialWindow, "scaling of a partial window" {
        /// Gradients are the mean over the micro-batches seen. The default.
        #[default]
        TrueMean = "true_mean",
        /// Every loss is divided by the configured number of steps, as the reference does.
        Reference = "reference",
    }
}

/// Where a window stands, to be saved with a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowState {
    /// Micro-batches since the count last restarted (`step` of the reference).
    pub step: usize,
    /// Micro-batches whose gradients are accumulated but not yet used by the optimizer.
    pub seen: usize,
    /// What the losses of these micro-batches were divided by, `gradient_accumulation_steps` when the window began. 0 if there are none, or
    /// if a checkpoint does not say; then the setting in force counts.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub num_steps: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// The state machine behind `Accelerator::accumulate`; pure, one call per micro-batch.
///
/// ```
/// use accelerate_core::accumulation::Window;
/// use accelerate_core::config::GradientAccumulationSettings;
///
/// let plugin = GradientAccumulationSettings { num_steps: 4, ..Default::default() };
/// let mut window = Window::new(plugin)?;
/// assert!(!window.advance(false).sync);
/// // The data loader ends after two micro-batches: the first gradient was scaled by 1/4, and counts half.
/// let last = window.advance(true);
/// assert!(last.sync);
/// assert_eq!((last.loss_scale, last.rescale_accumulated), (0.5, Some(2.0)));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    plugin: GradientAccumulationSettings,
    partial_window: PartialWindow,
    state: WindowState,
}

impl Window {
    /// An empty window.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): `num_steps` is 0.
    ///
    /// ```
    /// # use accelerate_core::{accumulation::Window, config::GradientAccumulationSettings};
    /// let mut window = Window::new(GradientAccumulationSettings::default())?;
    /// assert!(window.advance(false).sync); // one step per window: always
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn new(plugin: GradientAccumulationSettings) -> Result<Self> {
        plugin.check()?;
        Ok(Self { plugin, partial_window: PartialWindow::default(), state: WindowState::default() })
    }

    /// Chooses how a window that ends early is scaled.
    ///
    /// ```
    /// # use accelerate_core::{accumulation::{PartialWindow, Window}, config::GradientAccumulationSettings};
    /// let plugin = GradientAccumulationSettings { num_steps: 4, ..Default::default() };
    /// let mut window = Window::new(plugin)?.partial_window(PartialWindow::Reference);
    /// assert_eq!(window.advance(true).loss_scale, 0.25); // the only one, but divided by four
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    #[must_use]
    pub const fn partial_window(mut self, partial_window: PartialWindow) -> Self {
        self.partial_window = partial_window;
        self
    }

    /// Takes in one micro-batch and says what to do with it.
    ///
    /// `end_of_dataloader`: this is the last micro-batch of the data loader that is being iterated.
    ///
    /// ```
    /// # use accelerate_core::{accumulation::Window, config::GradientAccumulationSettings};
    /// let mut window = Window::new(GradientAccumulationSettings { num_steps: 2, ..Default::default() })?;
    /// let syncs: Vec<bool> = (0..5).map(|batch| window.advance(batch == 4).sync).collect();
    /// assert_eq!(syncs, [false, true, false, true, true]);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn advance(&mut self, end_of_dataloader: bool) -> Decision {
        let num_steps = self.plugin.num_steps;
        let sync = if end_of_dataloader && self.plugin.sync_with_dataloader {
            self.state.step = 0;
            true
        } else {
            self.state.step += 1;
            self.state.step.is_multiple_of(num_steps)
        };
        if self.state.seen == 0 {
            self.state.num_steps = num_steps;
        }
        self.state.seen += 1;

        let decision = match (sync, self.partial_window) {
            (true, PartialWindow::TrueMean) => self.true_mean(),
            _ => Decision {
                sync,
                reduce: sync || self.plugin.sync_each_batch,
                loss_scale: self.scale(),
                rescale_accumulated: None,
                micro_batches: self.state.seen,
            },
        };
        if sync {
            (self.state.seen, self.state.num_steps) = (0, 0);
        }
        decision
    }

    /// The last micro-batch of a window: with it, the accumulated gradients become a mean over `seen`.
    fn true_mean(&self) -> Decision {
        let (wanted, found) = (1.0 / self.state.seen as f64, self.scale());
        let accumulated_are_off = self.state.seen > 1 && wanted != found;
        Decision {
            sync: true,
            reduce: true,
            loss_scale: wanted,
            rescale_accumulated: accumulated_are_off.then(|| wanted / found),
            micro_batches: self.state.seen,
        }
    }

    /// What the losses of the open window are multiplied by.
    fn scale(&self) -> f64 {
        1.0 / self.state.num_steps as f64
    }

    /// The settings in force.
    pub const fn plugin(&self) -> &GradientAccumulationSettings {
        &self.plugin
    }

    /// Changes the number of micro-batches per window
    /// (`Accelerator.gradient_accumulation_steps` of the reference). An open window keeps its scale
    /// and is still made a true mean at its end.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): `num_steps` is 0.
    ///
    /// ```
    /// # use accelerate_core::{accumulation::Window, config::GradientAccumulationSettings};
    /// let mut window = Window::new(GradientAccumulationSettings::default())?;
    /// assert!(window.set_num_steps(0).is_err());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn set_num_steps(&mut self, num_steps: usize) -> Result<()> {
        let plugin = GradientAccumulationSettings { num_steps, ..self.plugin.clone() };
        plugin.check()?;
        self.plugin = plugin;
        Ok(())
    }

    /// Where the window stands.
    ///
    /// ```
    /// # use accelerate_core::{accumulation::Window, config::GradientAccumulationSettings};
    /// let plugin = GradientAccumulationSettings { num_steps: 3, ..Default::default() };
    /// let mut window = Window::new(plugin.clone())?;
    /// window.advance(false);
    /// let mut resumed = Window::new(plugin)?;
    /// resumed.restore(window.state());
    /// assert_eq!(resumed.advance(false), window.advance(false));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub const fn state(&self) -> WindowState {
        self.state
    }

    /// Goes on from a saved [`Window::state`], under the settings of this window: one that is open keeps its scale, as in
    /// [`set_num_steps`](Self::set_num_steps).
    pub fn restore(&mut self, state: WindowState) {
        let num_steps = match state {
            WindowState { seen: 0, .. } => 0,
            WindowState { num_steps: 0, .. } => self.plugin.num_steps,
            WindowState { num_steps, .. } => num_steps,
        };
        self.state = WindowState { num_steps, ..state };
    }

    /// Forgets accumulated micro-batches: for after the gradients were cleared outside a window's end
    /// (`free_memory` of the reference resets its counter likewise).
    pub fn reset(&mut self) {
        self.state = WindowState::default();
    }
}
