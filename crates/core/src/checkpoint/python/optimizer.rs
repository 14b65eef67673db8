//! The state dict of a PyTorch optimizer, and what it is here.

use super::values::{Left, from_json, to_json};
use crate::Result;
use crate::error::python::PythonErrorKind as Kind;
use crate::weight_files::{Plain, shown};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// State that has an element for each of its parameter's. Other state tells nothing of a parameter's shape.
const ELEMENTWISE: [&str; 6] = ["exp_avg", "momentum_buffer", "square_avg", "sum", "exp_avg_sq", "acc_delta"];
/// More parameters than any model has.
const MOST_PARAMETERS: usize = 1 << 20;

/// What belongs to names, in the order in which it was there.
pub type Named<T> = Vec<(String, Plain<T>)>;

/// The state of a PyTorch optimizer, as its `state_dict` gives it. `T` stands for a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct PythonOptimizer<T> {
    /// `param_groups`.
    pub groups: Vec<PythonGroup<T>>,
    /// `state`: by the number of a parameter, its tensors and numbers by name.
    pub state: Vec<(i64, Named<T>)>,
    /// The names of what else is there. No optimizer of PyTorch saves more.
    pub others: Vec<String>,
}

/// A group of parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct PythonGroup<T> {
    /// The numbers of its parameters.
    pub params: Vec<i64>,
    /// Their names, where the optimizer was made of named parameters.
    pub names: Option<Vec<String>>,
    /// All else: `lr`, `betas` and so on.
    pub settings: Named<T>,
}

/// What a state dict calls a parameter: a number, or its name, as FSDP does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Number(i64),
    Name(String),
}

impl Key {
    fn of<T>(value: &Plain<T>) -> Option<Self> {
        match value {
            Plain::Int(number) => Some(Self::Number(*number)),
            Plain::Text(name) => Some(Self::Name(name.clone())),
            _ => None,
        }
    }
}

fn wrong(reason: impl Into<String>) -> crate::Error {
    Kind::Optimizer { reason: reason.into() }.into()
}

impl<T: Clone> PythonOptimizer<T> {
    /// Reads a state dict. Where it has names for parameters, they are numbered in the order of the groups.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): it is not one of an optimizer.
    pub fn read(state_dict: &Plain<T>) -> Result<Self> {
        let Some(Plain::List(found)) = state_dict.get("param_groups") else {
            return Err(wrong("it has no list `param_groups`"));
        };
        let Some(Plain::Dict(state)) = state_dict.get("state") else {
            return Err(wrong("it has no dictionary `state`"));
        };
        let mut numbers: HashMap<Key, i64> = HashMap::new();
        let mut groups = Vec::with_capacity(found.len());
        for group in found {
            groups.push(PythonGroup::read(group, &mut numbers)?);
        }
        if let Some(name) = groups.iter().find_map(PythonGroup::foreign) {
            return Err(Kind::ForeignOptimizer { name }.into());
        }
        let mut seen = HashSet::new();
        let mut of_parameters = Vec::with_capacity(state.len());
        for (key, of_parameter) in state {
            let number = Key::of(key).and_then(|key| numbers.get(&key).copied());
            let Some(number) = number.filter(|number| seen.insert(*number)) else {
                return Err(wrong("it has state of a parameter that is in no group, or twice of the same"));
            };
            let Some(entries) = texts_of(of_parameter) else {
                let found = of_parameter.kind();
                return Err(wrong(format!("the state of parameter {number} is {found}, not a dictionary of names")));
            };
            of_parameters.push((number, entries));
        }
        let name_of = |key: &Plain<T>| if let Plain::Text(name) = key { name.clone() } else { key.kind() };
        let mut others = match state_dict {
            Plain::Dict(pairs) => pairs.iter().map(|(key, _)| name_of(key)).collect(),
            _ => Vec::new(),
        };
        others.retain(|name| name != "state" && name != "param_groups");
        Ok(Self { groups, state: of_parameters, others })
    }
}

/// Optimizers of PyTorch that this library does not have: settings that their groups have, and settings that they do not have,
/// but others do that have the same.
const FOREIGN: [(&str, &[&str], &[&str]); 9] = [
    ("LBFGS", &["history_size", "tolerance_grad"], &[]),
    ("Rprop", &["etas", "step_sizes"], &[]),
    ("ASGD", &["lambd", "t0"], &[]),
    ("Adadelta", &["rho", "eps"], &["betas"]),
    ("NAdam", &["betas", "momentum_decay"], &[]),
    ("Muon", &["ns_steps", "ns_coefficients"], &[]),
    ("RAdam", &["betas", "capturable", "decoupled_weight_decay"], &["amsgrad", "momentum_decay"]),
    ("Adamax", &["betas", "eps", "capturable"], &["amsgrad", "decoupled_weight_decay"]),
    ("SparseAdam", &["betas", "eps"], &["weight_decay"]),
];

impl<T: Clone> PythonGroup<T> {
    /// The optimizer that it is of, if this library has none like that.
    fn foreign(&self) -> Option<&'static str> {
        let has = |wanted: &&str| self.settings.iter().any(|(name, _)| name == wanted);
        let is_it =
            |(_, present, absent): &&(&str, &[&str], &[&str])| present.iter().all(has) && !absent.iter().any(has);
        FOREIGN.iter().find(is_it).map(|(name, ..)| *name)
    }

    fn read(group: &Plain<T>, numbers: &mut HashMap<Key, i64>) -> Result<Self> {
        let Some(mut settings) = texts_of(group) else { return Err(wrong("a group is no dictionary of settings")) };
        let Some(Plain::List(found)) = group.get("params") else {
            return Err(wrong("a group has no list `params`"));
        };
        let mut params = Vec::with_capacity(found.len());
        let mut own_names = Vec::new();
        for param in found {
            let next = numbers.len() as i64;
            let key = Key::of(param).ok_or_else(|| wrong("the parameters of a group are neither numbers nor names"))?;
            let number = match &key {
                Key::Number(number) => *number,
                Key::Name(name) => {
                    own_names.push(name.clone());
                    next
                }
            };
            if numbers.insert(key, number).is_some() || numbers.len() > MOST_PARAMETERS {
                return Err(wrong("a parameter is in two groups, or there are more than any model has"));
            }
            params.push(number);
        }
        let saved = match group.get("param_names") {
            Some(Plain::List(names)) => names
                .iter()
                .filter_map(|name| if let Plain::Text(name) = name { Some(name.clone()) } else { None })
                .collect(),
            _ => own_names,
        };
        if !saved.is_empty() && saved.len() != params.len() {
            return Err(wrong("the names of a group are not as many as its parameters"));
        }
        settings.retain(|(name, _)| name != "params" && name != "param_names");
        Ok(Self { names: (saved.len() == params.len()).then_some(saved), params, settings })
    }
}

/// The entries of a dictionary whose keys are texts. Of a key that is there twice, the last counts, as in Python.
fn texts_of<T: Clone>(value: &Plain<T>) -> Option<Named<T>> {
    let Plain::Dict(pairs) = value else { return None };
    let mut entries: Named<T> = Vec::with_capacity(pairs.len());
    let mut seen = HashSet::new();
    for (key, value) in pairs.iter().rev() {
        let Plain::Text(key) = key else { return None };
        if seen.insert(key) {
            entries.push((key.clone(), value.clone()));
        }
    }
    entries.reverse();
    Some(entries)
}

impl<T> PythonOptimizer<T> {
    /// Number of parameters in all groups.
    pub fn num_params(&self) -> usize {
        self.groups.iter().map(|group| group.params.len()).sum()
    }

    /// The shape of each parameter, in the order of the groups, as far as its state tells.
    pub(super) fn shapes(&self, shape_of: impl Fn(&T) -> Vec<u64>) -> Vec<Option<Vec<u64>>> {
        let of: BTreeMap<i64, &Named<T>> = self.state.iter().map(|(number, of)| (*number, of)).collect();
        let shape = |number: &i64| {
            let state = of.get(number)?;
            ELEMENTWISE.iter().find_map(|wanted| match state.iter().find(|(name, _)| name == wanted)? {
                (_, Plain::Tensor(tensor)) => Some(shape_of(tensor)),
                _ => None,
            })
        };
        self.groups.iter().flat_map(|group| &group.params).map(shape).collect()
    }

    /// The class of this library that goes on from it, where PyTorch's settings tell two apart that have the same state: Adam and
    /// AdamW. An `Adam(decoupled_weight_decay=True)` of PyTorch's is AdamW by another name.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): weight decay is decoupled in some of its groups and not in others.
    pub fn class(&self) -> Result<Option<&'static str>> {
        let is_decoupled = |group: &PythonGroup<T>| {
            let setting = group.settings.iter().find(|(name, _)| name == "decoupled_weight_decay")?;
            Some(matches!(setting.1, Plain::Bool(true)))
        };
        let found: BTreeSet<Option<bool>> = self.groups.iter().map(is_decoupled).collect();
        match (found.first(), found.len()) {
            (Some(Some(true)), 1) => Ok(Some("AdamW")),
            (Some(Some(false)), 1) => Ok(Some("Adam")),
            (_, 0 | 1) => Ok(None),
            _ => Err(wrong(
                "`decoupled_weight_decay` is not the same in all of its groups, and AdamW and Adam are two optimizers here",
            )),
        }
    }

    /// The name of each parameter, in the order of the groups, where the optimizer says it.
    pub(super) fn saved_names(&self) -> Vec<Option<&str>> {
        let mut names = Vec::with_capacity(self.num_params());
        for group in &self.groups {
            names.extend((0..group.params.len()).map(|place| Some(group.names.as_ref()?.get(place)?.as_str())));
        }
        names
    }

    /// The groups as this library saves them: the values of the object `optimizer`. `names` are those of all parameters.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): a learning rate, a weight decay or a momentum that is no number.
    pub fn to_groups(&self, names: &[String], left: &mut Left) -> Result<Value> {
        let mut names = names.iter();
        let mut groups = Vec::with_capacity(self.groups.len());
        for (place, group) in self.groups.iter().enumerate() {
            let mut options = Map::new();
            for (name, value) in &group.settings {
                let path = format!("param_groups[{place}].{}", shown(name));
                options.extend(to_json(value, &path, left).map(|value| (name.clone(), value)));
            }
            let found = group.settings.iter().find(|(name, _)| name == "lr").map(|(_, value)| match value {
                Plain::Float(number) => number.to_string(),
                other => other.kind(),
            });
            // In its place something else would be loaded.
            for name in ["weight_decay", "momentum", "betas"] {
                let Some((_, value)) = group.settings.iter().find(|(found, _)| found == name) else { continue };
                let number =
                    if name == "betas" { options.get(name).and_then(|it| it.get(0)) } else { options.get(name) };
                if !matches!(value, Plain::None) && !number.is_some_and(Value::is_number) {
                    let found = if let Plain::Float(number) = value { number.to_string() } else { value.kind() };
                    return Err(Kind::GroupSetting { place, name, found }.into());
                }
            }
            let mut take = |name: &str| options.remove(name);
            let lr = take("lr").filter(Value::is_number).ok_or(Kind::LearningRate { place, found })?;
            let (name, initial_lr) = (take("name"), take("initial_lr"));
            let (weight_decay, momentum) = (take("weight_decay"), take("momentum"));
            let first_beta = options.get("betas").and_then(|betas| betas.get(0)).cloned();
            if name.as_ref().is_some_and(|name| !name.is_string() && !name.is_null()) {
                left.add(&format!("param_groups[{place}].name"), "names of groups are texts");
            }
            if momentum.is_some() && first_beta.is_some() {
                left.add(&format!("param_groups[{place}].momentum"), "an optimizer with betas has none");
            }
            let number = |value: Option<Value>| value.filter(Value::is_number).unwrap_or_else(|| json!(0.0));
            groups.push(json!({
                "name": name.filter(Value::is_string),
                "params": names.by_ref().take(group.params.len()).collect::<Vec<_>>(),
                "lr": lr,
                "initial_lr": initial_lr.filter(Value::is_number),
                "weight_decay": number(weight_decay),
                "momentum": number(first_beta.or(momentum)),
                "options": options,
            }));
        }
        Ok(json!({ "param_groups": groups }))
    }

    /// The state by the names that it has here: `exp_avg.<parameter>`.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): state that is neither a tensor nor a number.
    pub fn named_state(&self, names: &[String]) -> Result<Vec<(String, &Plain<T>)>> {
        let numbers = self.groups.iter().flat_map(|group| &group.params);
        let name_of: BTreeMap<i64, &String> = numbers.copied().zip(names).collect();
        let mut named = Vec::new();
        for (number, of_parameter) in &self.state {
            let Some(parameter) = name_of.get(number) else { continue };
            for (name, value) in of_parameter {
                match value {
                    // SGD without momentum.
                    Plain::None => continue,
                    Plain::Tensor(_) | Plain::Int(_) | Plain::LargeInt(_) | Plain::Float(_) => {}
                    other => {
                        let (name, found) = (format!("{}.{}", shown(name), shown(parameter)), other.kind());
                        return Err(wrong(format!("its state `{name}` is {found}")));
                    }
                }
                named.push((format!("{name}.{parameter}"), value));
            }
        }
        Ok(named)
    }

    /// The state dict as PyTorch has it, of what this library saves: the values of the object `optimizer`, and its tensors by
    /// name.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): groups that no optimizer of this library saves, or state of no
    /// parameter of theirs.
    pub fn state_dict(values: &Value, tensors: impl IntoIterator<Item = (String, T)>) -> Result<Plain<T>> {
        let Some(found) = values.get("param_groups").and_then(Value::as_array) else {
            return Err(wrong("it has no `param_groups`"));
        };
        let mut numbers: BTreeMap<String, i64> = BTreeMap::new();
        let mut groups = Vec::with_capacity(found.len());
        for group in found {
            let params = group.get("params").and_then(Value::as_array);
            let names: Option<Vec<&str>> = params.and_then(|params| params.iter().map(Value::as_str).collect());
            let names = names.ok_or_else(|| wrong("a group has no names of parameters"))?;
            let first = numbers.len() as i64;
            for name in &names {
                let next = numbers.len() as i64;
                if numbers.insert((*name).to_owned(), next).is_some() {
                    return Err(wrong(format!("`{}` is in two groups", shown(name))));
                }
            }
            groups.push(group_dict(group, &names, first).ok_or_else(|| wrong("a group has no learning rate"))?);
        }
        let mut state: BTreeMap<i64, Named<T>> = BTreeMap::new();
        for (key, tensor) in tensors {
            // Neither names of states nor those of parameters are without dots for certain.
            let found = key.match_indices('.').find_map(|(dot, _)| Some((&key[..dot], *numbers.get(&key[dot + 1..])?)));
            let (name, number) = found.ok_or_else(|| wrong(format!("`{}` is state of no parameter", shown(&key))))?;
            state.entry(number).or_default().push((name.to_owned(), Plain::Tensor(tensor)));
        }
        // PyTorch's own order: the steps first.
        for of_parameter in state.values_mut() {
            of_parameter.sort_by_key(|(name, _)| name != "step");
        }
        let state = state.into_iter().map(|(number, of)| (Plain::Int(number), Plain::dict(of))).collect();
        Ok(Plain::dict([("state", Plain::Dict(state)), ("param_groups", Plain::List(groups))]))
    }
}

/// A group under PyTorch's names.
fn group_dict<T>(group: &Value, names: &[&str], first: i64) -> Option<Plain<T>> {
    let mut entries: Named<T> = Vec::new();
    let of = |name: &str| group.get(name).filter(|value| !value.is_null()).map(from_json);
    let none = Map::new();
    let options = group.get("options").and_then(Value::as_object).unwrap_or(&none);
    entries.push(("lr".to_owned(), of("lr")?));
    // Adam and Lion have it as the first of their betas; Adagrad and Adafactor have none.
    if ["dampening", "alpha"].iter().any(|name| options.contains_key(*name)) {
        entries.extend(of("momentum").map(|momentum| ("momentum".to_owned(), momentum)));
    }
    for (name, value) in options {
        // PyTorch's optimizers have pairs as tuples.
        let value = match from_json(value) {
            Plain::List(items) => Plain::Tuple(items),
            value => value,
        };
        entries.push((name.clone(), value));
    }
    for name in ["weight_decay", "initial_lr", "name"] {
        entries.extend(of(name).map(|value| (name.to_owned(), value)));
    }
    let params = (first..).take(names.len()).map(Plain::Int).collect();
    entries.push(("params".to_owned(), Plain::List(params)));
    entries.push(("param_names".to_owned(), Plain::List(names.iter().map(|name| Plain::text(*name)).collect())));
    Some(Plain::dict(entries))
}
