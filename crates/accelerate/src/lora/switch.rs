//! Adapters that are off for the length of a call.

use super::PeftModel;

/// Sets what held before when it is dropped, after a panic, too.
pub(super) struct Switch<'a> {
    model: &'a PeftModel,
    before: bool,
}

impl<'a> Switch<'a> {
    pub(super) fn off(model: &'a PeftModel) -> Self {
        Self { model, before: model.set_enabled(false) }
    }
}

impl Drop for Switch<'_> {
    fn drop(&mut self) {
        self.model.set_enabled(self.before);
    }
}
