//! Code goes before flags, flags before the environment, that before a file, and that before defaults.

use super::normalise::normalise;
use super::{ConfigFile, Message, Notes, PartialRunConfig, RunConfig, name_for, read_environment, settings};
use crate::Result;
use crate::config::fully_sharded::state_dict_notes;
use crate::error::settings::SettingsErrorKind as Kind;
use crate::settings::{
    DEFAULTS_VARIABLE, ORIGINS_VARIABLE, Origin, Origins, Position, Setting, Standing, shortened, shortened_line,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// Gives the value of a variable by its name.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Everybody who may say something about a run, the first before the last, setting by setting.
#[derive(Clone, Default)]
pub struct Sources<'a> {
    /// What the program says.
    pub code: PartialRunConfig,
    /// Flags of the launcher with their texts.
    pub flags: Vec<(&'static Setting, String)>,
    /// The environment.
    pub environment: Option<Lookup<'a>>,
    /// A configuration file.
    pub file: Option<ConfigFile>,
    /// A launcher asks for a program in Python. Engines there can do what those here refuse or pass over, so that is handed on
    /// without a word.
    pub is_for_python: bool,
}

impl fmt::Debug for Sources<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sources").field("code", &self.code).field("file", &self.file).finish_non_exhaustive()
    }
}

/// Where the launcher took the value of a variable from.
#[derive(Debug, Serialize, Deserialize)]
struct LaunchedFrom {
    value: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    flag: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<(PathBuf, Option<Position>)>,
}

/// A value that does not hold, because somebody closer to the program said something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overridden {
    /// The setting, as [`Setting::path`] spells it.
    pub setting: &'static str,
    /// What was said.
    pub value: String,
    /// Where.
    pub origin: Origin,
}

impl RunConfig {
    /// Puts the sources together: code before flags before environment before file before default, setting by setting.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config) and [`Error::is_environment`](crate::Error::is_environment): a text that
    /// is no value of its setting, naming where it stands; settings that contradict each other, naming both places; settings
    /// that are refused, with the reason.
    ///
    /// ```
    /// use accelerate_core::config::{MixedPrecision, PartialRunConfig, RunConfig, Sources};
    /// let mut code = PartialRunConfig::default();
    /// code.cluster.mixed_precision = Some(MixedPrecision::Fp16);
    /// let lookup = |name: &str| (name == "ACCELERATE_MIXED_PRECISION").then(|| "bf16".to_owned());
    /// let config = RunConfig::resolve(Sources { code, environment: Some(&lookup), ..Default::default() })?;
    /// assert_eq!(config.cluster.mixed_precision, MixedPrecision::Fp16);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn resolve(sources: Sources<'_>) -> Result<Self> {
        let (config, errors) = resolve_all(sources)?;
        errors.into_iter().next().map_or(Ok(config), Err)
    }

    /// Everything that is wrong with the sources, as far as one thing does not hide another, and what has no effect.
    ///
    /// ```
    /// use accelerate_core::config::{ConfigFile, RunConfig, Sources};
    /// let text = "tpu_name: a\nrdzv_backend: etcd\nmonitor_interval: 2\n";
    /// let file = Some(ConfigFile::read(text, "run.yaml".as_ref())?);
    /// let (errors, messages) = RunConfig::problems(Sources { file, ..Default::default() });
    /// assert_eq!((errors.len(), messages.len()), (2, 1));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn problems(sources: Sources<'_>) -> (Vec<crate::Error>, Vec<Message>) {
        match resolve_all(sources) {
            Ok((config, errors)) => (errors, config.notes.messages),
            Err(error) => (vec![error], Vec::new()),
        }
    }

    /// What others said of the setting with this path, who are further away from the program than the value that holds; the
    /// closest first.
    ///
    /// ```
    /// use accelerate_core::config::{ConfigFile, PartialRunConfig, RunConfig, Sources};
    /// let file = Some(ConfigFile::read("num_processes: 4\n", "run.yaml".as_ref())?);
    /// let mut code = PartialRunConfig::default();
    /// code.cluster.num_processes = Some(2);
    /// let config = RunConfig::resolve(Sources { code, file, ..Default::default() })?;
    /// let overridden: Vec<_> = config.overridden("num_processes").map(|other| other.origin.to_string()).collect();
    /// assert_eq!(overridden, ["run.yaml:1:1"]);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn overridden(&self, path: &str) -> impl Iterator<Item = &Overridden> {
        self.notes.overridden.iter().filter(move |other| other.setting == path)
    }

    /// The variables by which a launcher says to its processes what flags and a file have said to it, also of records whose
    /// switch is off, because programs may switch them on. What the environment says they inherit. One more variable says where
    /// each value came from.
    ///
    /// ```
    /// use accelerate_core::config::{RunConfig, Sources, settings};
    /// let setting = settings().find(|setting| setting.flag() == Some("fsdp_version")).unwrap();
    /// let cluster = settings().find(|setting| setting.flag() == Some("use_fsdp")).unwrap();
    /// let flags = vec![(setting, "2".to_owned()), (cluster, "true".to_owned())];
    /// let variables = RunConfig::resolve(Sources { flags, ..Default::default() })?.variables();
    /// assert_eq!(variables["FSDP_VERSION"], "2");
    /// assert_eq!(variables["ACCELERATE_USE_FSDP"], "true");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn variables(&self) -> BTreeMap<String, String> {
        let said = PartialRunConfig::from(self.clone());
        let mut variables = BTreeMap::new();
        let mut launched = BTreeMap::new();
        let counts = settings().filter_map(|setting| Some((setting, said.text(setting)?, self.origin(setting.path))));
        let unused = self.notes.unused.iter().map(|unused| (unused.setting, unused.found.clone(), &unused.origin));
        for (setting, value, origin) in counts.chain(unused) {
            let is_withheld = is_withheld(setting, self.notes.is_for_python, self.cluster.use_deepspeed);
            let is_handed_on = !setting.declaration.is_for_launcher && !is_withheld;
            let Some(variable) = setting.variable().filter(|_| is_handed_on) else { continue };
            let (flag, file) = match origin {
                // What another variable decided, such as that of the distributed_type, is said to processes that do not
                // know that one, too.
                Origin::Environment(name) if *name != variable => (None, None),
                Origin::Flag(flag) => (Some(flag.clone()), None),
                Origin::File { path, position } => (None, Some((path.clone(), *position))),
                Origin::Derived(_) => (None, None),
                Origin::Code | Origin::Environment(_) | Origin::Default => continue,
            };
            if flag.is_some() || file.is_some() {
                launched.insert(variable.clone(), LaunchedFrom { value: value.clone(), flag, file });
            }
            variables.insert(variable, value);
        }
        // What was decided here must not meet the other word for it, which processes may inherit. Python's launcher writes
        // "true" unasked, and so it says nothing against a strategy.
        let reshard = "FSDP_RESHARD_AFTER_FORWARD";
        if self.cluster.use_fsdp && variables.contains_key("FSDP_SHARDING_STRATEGY") && !variables.contains_key(reshard)
        {
            variables.insert(reshard.to_owned(), "true".to_owned());
        }
        if !launched.is_empty() {
            let origins = serde_json::to_string(&launched).unwrap_or_default();
            variables.insert(ORIGINS_VARIABLE.to_owned(), origins);
        }
        variables
    }

    /// The error with the places of the settings that it is about, where those are not the program's own. It may call
    /// settings of `section` by their fields alone.
    ///
    /// ```
    /// use accelerate_core::config::{ConfigFile, DeepSpeedFacts, RunConfig, Sources};
    /// let text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  deepspeed_config_file: ds.json\n";
    /// let file = Some(ConfigFile::read(text, "run.yaml".as_ref())?);
    /// let run = RunConfig::resolve(Sources { file, ..Default::default() })?;
    /// let read = |_: &std::path::Path| Ok(r#"{"zero_optimization": {"stage": 3}}"#.to_owned());
    /// let error = run.with_places("deepspeed_config", run.deepspeed.config(&read).unwrap_err());
    /// assert!(error.to_string().ends_with("(deepspeed_config.zero_stage: run.yaml:3:3)"), "{error}");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_places(&self, section: &str, error: crate::Error) -> crate::Error {
        let names = error.settings();
        let named: Vec<_> = settings()
            .filter(|setting| names.iter().any(|name| is_named(setting, section, name)))
            .map(|setting| (setting, self.origin(setting.path)))
            .collect();
        let is_said = |origin: &Origin| !matches!(origin, Origin::Code | Origin::Default | Origin::Derived(_));
        let said = named.iter().filter(|(_, origin)| is_said(origin));
        let places: Vec<_> =
            said.map(|(setting, origin)| format!("{}: {origin}", name_for(setting.path, origin))).collect();
        if places.is_empty() {
            return error;
        }
        // Whoever wrote a file looks for its keys, and adds what is missing there.
        let is_of_file = named.iter().any(|(_, origin)| matches!(origin, Origin::File { .. }));
        let is_in_file = |origin: &Origin| matches!(origin, Origin::File { .. }) || *origin == Origin::Default;
        let mut problem = error.to_string();
        for (setting, _) in named.iter().filter(|(_, origin)| is_of_file && is_in_file(origin)) {
            problem = with_file_key(&problem, setting);
        }
        error.with_places(problem, places.join(", "))
    }

    fn check(&self) -> Result<()> {
        let in_section =
            |section: &'static str, checked: Result<()>| checked.map_err(|error| self.with_places(section, error));
        in_section("", self.cluster.check())?;
        in_section("dataloader_config", self.dataloader.check())?;
        in_section("gradient_accumulation_config", self.gradient_accumulation.check())?;
        in_section("ddp_config", self.ddp.check())?;
        in_section("grad_scaler_config", self.grad_scaler.check())?;
        in_section("process_group_config", self.process_group.check())?;
        if self.notes.is_for_python {
            return Ok(());
        }
        in_section("parallelism_config", self.parallelism.check())?;
        if let Some(fsdp) = self.fsdp_in_use() {
            in_section("fsdp_config", fsdp.check())?;
            in_section("fsdp_config", fsdp.check_precision(self.cluster.mixed_precision))?;
        }
        if self.cluster.use_deepspeed {
            in_section("deepspeed_config", self.deepspeed.check())?;
        }
        in_section("dynamo_config", self.dynamo.compilation().map(drop))
    }
}

fn is_part_of_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || "_.".contains(character)
}

/// The text with the key that files have for a setting in the place of its field. A field without `_` may be a word of the
/// sentence.
fn with_file_key(text: &str, setting: &Setting) -> String {
    let key = setting.file_key();
    let written = key.rsplit('.').next().unwrap_or(&key);
    if written == setting.field || !setting.field.contains('_') {
        return text.to_owned();
    }
    let changed = |word: &str| {
        let (bare, after) = word.split_at(word.trim_end_matches('.').len());
        if bare == setting.field { format!("{written}{after}") } else { word.to_owned() }
    };
    let (mut result, mut rest) = (String::new(), text);
    while !rest.is_empty() {
        let word_length = rest.find(|character| !is_part_of_word(character)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(word_length);
        let between = after.find(is_part_of_word).unwrap_or(after.len());
        result += &changed(word);
        result += &after[..between];
        rest = &after[between..];
    }
    result
}

/// Is the setting among the words of `name`: by its path, or in its own section by its field?
fn is_named(setting: &Setting, section: &str, name: &str) -> bool {
    name.split(|character| !is_part_of_word(character)).any(|word| {
        let field = word.split('.').next().unwrap_or_default();
        word == setting.path || (setting.section == section && field == setting.field)
    })
}

/// The configuration, and what is wrong with it. Fails where there is not even a value.
fn resolve_all(sources: Sources<'_>) -> Result<(RunConfig, Vec<crate::Error>)> {
    let deepspeed_keys = sources.file.as_ref().map(ConfigFile::deepspeed_keys).unwrap_or_default();
    let mut notes = Notes { is_for_python: sources.is_for_python, deepspeed_keys, ..Notes::default() };
    let Merge { mut partial, mut origins, overridden } = merge(sources)?;
    notes.overridden = overridden;
    let mut errors = Vec::from_iter(normalise(&mut partial, &mut origins, &mut notes).err());
    errors.extend(stand(&partial, &origins, &mut notes));
    let config = partial.settle(origins, notes);
    if errors.is_empty() {
        errors.extend(config.check().err());
    }
    Ok((config, errors))
}

/// What the sources say together.
#[derive(Default)]
struct Merge {
    partial: PartialRunConfig,
    origins: Origins,
    overridden: Vec<Overridden>,
}

impl Merge {
    /// Adds the next source, with the places of what it says.
    fn add(&mut self, source: &PartialRunConfig, said: Vec<(&'static Setting, Origin)>) {
        let filled = self.partial.fill(source);
        for (setting, origin) in said {
            match filled.iter().any(|filled| filled.path == setting.path) {
                true => self.origins.set(setting, origin),
                false => self.overridden.extend(source.text(setting).map(|value| Overridden {
                    setting: setting.path,
                    value,
                    origin,
                })),
            }
        }
    }
}

fn merge(sources: Sources<'_>) -> Result<Merge> {
    let mut merge = Merge::default();
    for setting in merge.partial.fill(&sources.code) {
        merge.origins.set(setting, Origin::Code);
    }
    let (flags, said) = read_flags(sources.flags)?;
    merge.add(&flags, said);
    if let Some(lookup) = sources.environment {
        let unasked = lookup(DEFAULTS_VARIABLE).and_then(|text| serde_json::from_str(&text).ok());
        let unasked: BTreeMap<String, String> = unasked.unwrap_or_default();
        let said_by_somebody = |name: &str| lookup(name).filter(|value| unasked.get(name) != Some(value));
        let (environment, said) = read_environment(&said_by_somebody)?;
        let launched = lookup(ORIGINS_VARIABLE).and_then(|text| serde_json::from_str(&text).ok());
        let launched: BTreeMap<String, LaunchedFrom> = launched.unwrap_or_default();
        let before = |(setting, origin)| (setting, before_launch(origin, &launched, environment.text(setting)));
        merge.add(&environment, said.into_iter().map(before).collect());
    }
    if let Some(file) = sources.file {
        let mut said: Vec<(&'static Setting, Option<Position>)> = Vec::new();
        // Of a key that is there under two names, the last one counts.
        for (setting, position) in &file.places {
            said.retain(|(known, _)| known.path != setting.path);
            said.push((setting, *position));
        }
        let said = said.into_iter().map(|(setting, position)| (setting, file.origin(position))).collect();
        merge.add(&file.partial, said);
    }
    Ok(merge)
}

/// What flags say. Of a flag that is there twice the last one counts.
fn read_flags(flags: Vec<(&'static Setting, String)>) -> Result<(PartialRunConfig, Vec<(&'static Setting, Origin)>)> {
    let mut partial = PartialRunConfig::default();
    let mut said: Vec<(&'static Setting, Origin)> = Vec::new();
    for (setting, text) in flags {
        let flag = setting.flag().unwrap_or(setting.field);
        if !partial.say(setting, &text) {
            let wanted = setting.wanted_for(&text);
            return Err(Kind::Flag { flag: flag.to_owned(), found: shortened(&text), wanted }.into());
        }
        said.push((setting, Origin::Flag(format!("--{flag}"))));
    }
    Ok((partial, said))
}

/// A variable that the launcher set, and nobody changed, stands for the flag or the line that it came from.
fn before_launch(origin: Origin, launched: &BTreeMap<String, LaunchedFrom>, value: Option<String>) -> Origin {
    let Origin::Environment(name) = &origin else { return origin };
    match launched.get(name) {
        Some(LaunchedFrom { value: then, flag: Some(flag), .. }) if Some(then) == value.as_ref() => {
            Origin::Flag(flag.clone())
        }
        Some(LaunchedFrom { value: then, file: Some((path, position)), .. }) if Some(then) == value.as_ref() => {
            Origin::File { path: path.clone(), position: *position }
        }
        _ => origin,
    }
}

/// To a constructor in Python the number of micro-batches in the environment goes before its own argument, so it is handed on
/// where the reference does it: with DeepSpeed.
fn is_withheld(setting: &Setting, is_for_python: bool, is_deepspeed: bool) -> bool {
    is_for_python && !is_deepspeed && setting.path == "gradient_accumulation_config.num_steps"
}

/// The errors of what is refused. Notes what has no effect.
fn stand(partial: &PartialRunConfig, origins: &Origins, notes: &mut Notes) -> Vec<crate::Error> {
    let Notes { messages, is_for_python, overridden, .. } = notes;
    let mut errors = Vec::new();
    for setting in settings() {
        let Some(found) = partial.text(setting).filter(|found| !setting.asks_for_nothing(found)) else { continue };
        let origin = origins.get(setting.path);
        let is_of_command = matches!(origin, Origin::Flag(_) | Origin::File { .. });
        if is_of_command && is_withheld(setting, *is_for_python, partial.cluster.use_deepspeed == Some(true)) {
            let why =
                "a program in Python says it in its constructor, and is told it with --use_deepspeed only".to_owned();
            messages.push(Message { setting: setting.path, found, origin: origin.clone(), why });
            continue;
        }
        let found = if setting.hides(&found) { "(not shown)".to_owned() } else { shortened_line(&found) };
        match setting.standing_for(*is_for_python) {
            Standing::Honoured => {}
            // The distributed_type of a file has made way for it.
            Standing::WithoutEffect(_)
                if setting.path == "multi_gpu" && overridden.iter().any(|it| it.setting == "distributed_type") => {}
            Standing::WithoutEffect(why) => {
                messages.push(Message { setting: setting.path, found, origin: origin.clone(), why: why.to_owned() });
            }
            Standing::Refused(why) => {
                let (name, origin) = (name_for(setting.path, origin), origin.to_string());
                errors.push(Kind::Refused { name, found, origin, why }.into());
            }
        }
    }
    // PyTorch's engines have them.
    for (setting, why) in state_dict_notes(&partial.fsdp).filter(|_| !*is_for_python) {
        let found = settings().find(|it| it.path == setting).and_then(|it| partial.text(it)).unwrap_or_default();
        let (found, origin) = (shortened(&found), origins.get(setting).clone());
        messages.push(Message { setting, found, origin, why: why.to_owned() });
    }
    errors
}
