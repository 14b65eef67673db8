//! Grids of cases, trained by one start of the programs for each world size: both sides read one file of cases and write one
//! of outcomes.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::python::Environment;
use crate::{libtorch, paths, process, ranks};

/// The programs of one grid, `parity/<name>.py` and our `parity_<name>`, and its cases.
pub(super) struct Grid {
    name: &'static str,
    environment: Environment,
    work: PathBuf,
    num_cases: usize,
}

impl Grid {
    /// Installs and builds what is needed, and writes the cases.
    pub(super) fn new<C: Serialize>(name: &'static str, cases: &[C]) -> Result<Self> {
        libtorch::ensure()?;
        Self::in_environment(name, Environment::ensure()?, cases)
    }

    /// The same with a Python that has more packages.
    pub(super) fn in_environment<C: Serialize>(
        name: &'static str,
        environment: Environment,
        cases: &[C],
    ) -> Result<Self> {
        ranks::build()?;
        let work = paths::target_folder().join("parity").join(name);
        fs::create_dir_all(&work)?;
        println!("reference: {}", environment.versions);
        let grid = Self { name, environment, work, num_cases: cases.len() };
        fs::write(grid.cases_file(), serde_json::to_string(cases)?)?;
        Ok(grid)
    }

    /// What comes of every case here.
    pub(super) fn ours<O: DeserializeOwned>(&self, world_size: usize) -> Result<Vec<O>> {
        let mut command = ranks::launch(world_size, &paths::release_binary(&format!("parity_{}", self.name)));
        command.arg("--");
        self.outcomes(command, world_size, "rust")
    }

    /// What comes of every case in Python, whose program is given `flags`.
    pub(super) fn theirs<O: DeserializeOwned>(&self, world_size: usize, flags: &[&str]) -> Result<Vec<O>> {
        let mut command = self.environment.torchrun(world_size)?;
        command.arg(paths::repository_root().join(format!("parity/{}.py", self.name))).args(flags);
        self.outcomes(command, world_size, &format!("python{}", flags.concat()))
    }

    fn cases_file(&self) -> PathBuf {
        self.work.join("cases.json")
    }

    fn outcomes<O: DeserializeOwned>(&self, mut command: Command, world_size: usize, side: &str) -> Result<Vec<O>> {
        let output = self.work.join(format!("{side}{world_size}"));
        if output.exists() {
            fs::remove_dir_all(&output).with_context(|| format!("could not remove {}", output.display()))?;
        }
        command.arg("--cases").arg(self.cases_file()).args(["--world_size", &world_size.to_string()]);
        process::read(command.arg("--output").arg(&output))?;
        let file = output.join("outcomes.json");
        let text = fs::read_to_string(&file).with_context(|| format!("could not read {}", file.display()))?;
        let outcomes: Vec<O> = serde_json::from_str(&text)?;
        ensure!(outcomes.len() == self.num_cases, "{} of {} cases were trained", outcomes.len(), self.num_cases);
        Ok(outcomes)
    }
}
