//! The modules of a model, as the paths of its tensors show them.

use super::pattern::fits;
use super::{ElementType, MapDevice};
use crate::Result;
use crate::error::device_map::DeviceMapErrorKind;
use std::collections::{BTreeMap, HashMap};

/// A parameter or buffer, as a map has to know it.
///
/// ```
/// use accelerate_core::device_map::MapTensor;
/// let weight = MapTensor::new("decoder.weight", 12, "float32")?.tied_to("words.weight");
/// assert_eq!(weight.tied_to.as_deref(), Some("words.weight"));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapTensor {
    /// Its path: the path of its module and its own name.
    pub name: String,
    /// Number of its elements.
    pub num_elements: u64,
    /// Type of its elements.
    pub dtype: ElementType,
    /// Is it a buffer, not a parameter?
    pub is_buffer: bool,
    /// The first name of the parameter that this is a second name of.
    pub tied_to: Option<String>,
}

impl MapTensor {
    /// A parameter with one name. `dtype` is PyTorch's name of its element type.
    ///
    /// # Errors
    /// [`is_plan`](crate::Error::is_plan): there is no such type.
    pub fn new(name: &str, num_elements: u64, dtype: &str) -> Result<Self> {
        Ok(Self { name: name.to_owned(), num_elements, dtype: dtype.parse()?, is_buffer: false, tied_to: None })
    }

    /// The same as a buffer.
    #[must_use]
    pub fn buffer(self) -> Self {
        Self { is_buffer: true, ..self }
    }

    /// The same as a second name of the parameter `first`.
    #[must_use]
    pub fn tied_to(self, first: &str) -> Self {
        Self { tied_to: Some(first.to_owned()), ..self }
    }
}

/// In which types a model will be loaded.
///
/// ```
/// use accelerate_core::device_map::SizeOptions;
/// let options = SizeOptions { dtype: Some("float16".parse()?), ..Default::default() };
/// assert!(options.special_dtypes.is_empty());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SizeOptions {
    /// That of all numbers with a point, where it takes less than their own. Integers stay as they are.
    pub dtype: Option<ElementType>,
    /// Those of tensors by name, whatever `dtype` says.
    pub special_dtypes: BTreeMap<String, ElementType>,
}

/// A module or a tensor of a [`ModuleTree`], by its place there.
pub(super) type NodeId = usize;

#[derive(Clone, Debug, Default)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) tensor: Option<MapTensor>,
    /// Parameters, modules and buffers directly in a module.
    pub(super) parameters: Vec<NodeId>,
    pub(super) children: Vec<NodeId>,
    pub(super) buffers: Vec<NodeId>,
}

/// The modules of a model with their tensors. Modules without tensors, such as activations, are not in it: there is nothing
/// to keep of them.
///
/// ```
/// use accelerate_core::device_map::{MapTensor, ModuleTree};
/// let tensors = [MapTensor::new("layer.0.weight", 6, "float32")?, MapTensor::new("layer.0.bias", 2, "float32")?];
/// let tree = ModuleTree::new(tensors)?;
/// assert_eq!(tree.module_bytes("layer.0", &Default::default()), Some(32));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ModuleTree {
    /// The root is the first; parents come before their children.
    pub(super) nodes: Vec<Node>,
    by_name: HashMap<String, NodeId>,
    /// Parameters with several names, each by all of them in alphabetical order.
    pub(super) ties: Vec<Vec<NodeId>>,
}

/// The root of every tree.
pub(super) const ROOT: NodeId = 0;

impl ModuleTree {
    /// The tree of tensors in the order in which they were registered; second names stand where their modules are.
    ///
    /// # Errors
    /// [`is_plan`](crate::Error::is_plan): a name is there twice, is malformed, or is that of a module as well; a tensor is
    /// tied to one that is not there.
    pub fn new(tensors: impl IntoIterator<Item = MapTensor>) -> Result<Self> {
        let root = Node::default();
        let mut tree = Self { nodes: vec![root], by_name: HashMap::from([(String::new(), ROOT)]), ties: Vec::new() };
        let mut names: BTreeMap<String, Vec<NodeId>> = BTreeMap::new();
        for tensor in tensors {
            let first = tensor.tied_to.clone();
            let id = tree.insert(tensor)?;
            if let Some(first) = first {
                names.entry(first).or_default().push(id);
            }
        }
        for (first, mut group) in names {
            let id = tree.by_name.get(&first).copied().filter(|&id| tree.is_first_name(id));
            let Some(id) = id else {
                let name = tree.nodes[group[0]].name.clone();
                return Err(DeviceMapErrorKind::TiedToNothing { name, first }.into());
            };
            group.push(id);
            group.sort_by(|one, other| tree.nodes[*one].name.cmp(&tree.nodes[*other].name));
            tree.ties.push(group);
        }
        Ok(tree)
    }

    fn is_first_name(&self, id: NodeId) -> bool {
        self.nodes[id].tensor.as_ref().is_some_and(|tensor| tensor.tied_to.is_none())
    }

    fn insert(&mut self, tensor: MapTensor) -> Result<NodeId> {
        let name = tensor.name.clone();
        if name.is_empty() || name.split('.').any(str::is_empty) {
            return Err(DeviceMapErrorKind::Name { name, problem: "is malformed" }.into());
        }
        if self.by_name.contains_key(&name) {
            return Err(DeviceMapErrorKind::Name { name, problem: "is there twice" }.into());
        }
        let mut parent = ROOT;
        for (end, _) in name.match_indices('.') {
            parent = self.module(&name[..end], parent)?;
        }
        let is_buffer = tensor.is_buffer;
        let id = self.push(Node { name, tensor: Some(tensor), ..Node::default() });
        let parent = &mut self.nodes[parent];
        if is_buffer { &mut parent.buffers } else { &mut parent.parameters }.push(id);
        Ok(id)
    }

    fn module(&mut self, path: &str, parent: NodeId) -> Result<NodeId> {
        if let Some(&id) = self.by_name.get(path) {
            if self.nodes[id].tensor.is_some() {
                let problem = "is that of a tensor and of a module with tensors";
                return Err(DeviceMapErrorKind::Name { name: path.to_owned(), problem }.into());
            }
            return Ok(id);
        }
        let id = self.push(Node { name: path.to_owned(), ..Node::default() });
        self.nodes[parent].children.push(id);
        Ok(id)
    }

    fn push(&mut self, node: Node) -> NodeId {
        let id = self.nodes.len();
        self.by_name.insert(node.name.clone(), id);
        self.nodes.push(node);
        id
    }

    /// Is there a module or a tensor of this path?
    pub fn contains(&self, path: &str) -> bool {
        self.by_name.contains_key(path)
    }

    /// All tensors in the order of the tree: of each module its parameters, its modules, and its buffers.
    pub fn tensors(&self) -> impl Iterator<Item = &MapTensor> {
        self.in_order().into_iter().filter_map(|id| self.nodes[id].tensor.as_ref())
    }

    /// Bytes of a module or tensor with all that is in it, tied parameters under their first name only. `None` where there is
    /// no such path.
    pub fn module_bytes(&self, path: &str, options: &SizeOptions) -> Option<u64> {
        let id = *self.by_name.get(path)?;
        Some(whole_bytes(self.sizes(options, |_| true)[id]))
    }

    /// Every node in the order of the tree, the root first.
    pub(super) fn in_order(&self) -> Vec<NodeId> {
        let mut order = Vec::with_capacity(self.nodes.len());
        let mut stack = vec![ROOT];
        while let Some(id) = stack.pop() {
            order.push(id);
            let Node { parameters, children, buffers, .. } = &self.nodes[id];
            stack.extend(buffers.iter().rev().chain(children.iter().rev()).chain(parameters.iter().rev()));
        }
        order
    }

    /// Bits of every node, by id; of the tensors that are `counted` only.
    pub(super) fn sizes(&self, options: &SizeOptions, counted: impl Fn(&MapTensor) -> bool) -> Vec<i128> {
        let mut sizes = vec![0; self.nodes.len()];
        for (id, node) in self.nodes.iter().enumerate() {
            if let Some(tensor) = node.tensor.as_ref().filter(|tensor| tensor.tied_to.is_none() && counted(tensor)) {
                sizes[id] = tensor_bits(tensor, options);
            }
        }
        // Parents stand before their children.
        for id in (0..self.nodes.len()).rev() {
            let Node { parameters, children, buffers, .. } = &self.nodes[id];
            sizes[id] += parameters.iter().chain(children).chain(buffers).map(|&part| sizes[part]).sum::<i128>();
        }
        sizes
    }

    /// Is `inner` in `outer`, or the same?
    pub(super) fn is_within(&self, inner: NodeId, outer: NodeId) -> bool {
        let (inner, outer) = (&self.nodes[inner].name, &self.nodes[outer].name);
        outer.is_empty()
            || inner.strip_prefix(outer.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }

    /// The modules whose paths fit one of the patterns, with which one.
    pub(super) fn matching(&self, patterns: &[String]) -> HashMap<NodeId, usize> {
        let modules = self.nodes.iter().enumerate().filter(|(_, node)| node.tensor.is_none());
        let first = |(id, node): (NodeId, &Node)| {
            let pattern = patterns.iter().position(|pattern| fits(pattern, &node.name))?;
            Some((id, pattern))
        };
        modules.filter_map(first).collect()
    }

    /// Those of `patterns` that fit no module.
    pub fn without_module<'a>(&self, patterns: &'a [String]) -> Vec<&'a str> {
        let names = || self.nodes.iter().filter(|node| node.tensor.is_none()).map(|node| node.name.as_str());
        let fits_none = |pattern: &&String| !names().any(|name| fits(pattern, name));
        patterns.iter().filter(fits_none).map(String::as_str).collect()
    }

    /// What the reference splits a module into: its parameters and its modules.
    pub(super) fn parts(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let Node { parameters, children, .. } = &self.nodes[id];
        parameters.iter().chain(children).copied()
    }

    /// The bits of tensors on each device that a map names for them.
    pub(super) fn bits_by_device(
        &self,
        device_of: impl Fn(&str) -> Option<MapDevice>,
        options: &SizeOptions,
    ) -> BTreeMap<MapDevice, i128> {
        let mut bits = BTreeMap::new();
        for tensor in self.tensors().filter(|tensor| tensor.tied_to.is_none()) {
            if let Some(device) = device_of(&tensor.name) {
                *bits.entry(device).or_default() += tensor_bits(tensor, options);
            }
        }
        bits
    }
}

fn tensor_bits(tensor: &MapTensor, options: &SizeOptions) -> i128 {
    let own = tensor.dtype.bits();
    let bits = match (options.special_dtypes.get(&tensor.name), &options.dtype) {
        (Some(special), _) => special.bits(),
        (None, Some(dtype)) if !tensor.dtype.is_kept() => own.min(dtype.bits()),
        (None, _) => own,
    };
    i128::from(tensor.num_elements) * i128::from(bits)
}

/// Bits in bytes, rounded up.
pub(super) fn whole_bytes(bits: i128) -> u64 {
    u64::try_from(bits.max(0).div_euclid(8) + i128::from(bits.max(0) % 8 != 0)).unwrap_or(u64::MAX)
}
