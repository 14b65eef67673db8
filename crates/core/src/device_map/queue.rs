//! Modules that have no device yet, in order, and the largest layer among them.

use super::tree::{ModuleTree, NodeId};
use std::collections::{HashMap, VecDeque};

/// The part of a tree that is still to be placed, with what every look at it needs.
#[derive(Debug)]
pub(super) struct Layers<'a> {
    pub(super) tree: &'a ModuleTree,
    /// Bits of every node.
    pub(super) sizes: Vec<i128>,
    /// Modules that are not split.
    pub(super) whole: HashMap<NodeId, usize>,
}

/// The largest layer of those that are left, and which layers are as large.
#[derive(Debug, Default)]
pub(super) struct Largest {
    pub(super) bits: i128,
    pub(super) layers: Vec<NodeId>,
}

impl Layers<'_> {
    /// Can a module be placed in parts?
    pub(super) fn is_splittable(&self, id: NodeId) -> bool {
        !self.tree.nodes[id].children.is_empty() && !self.whole.contains_key(&id)
    }

    pub(super) fn is_module(&self, id: NodeId) -> bool {
        self.tree.nodes[id].tensor.is_none()
    }

    /// A layer is a module without modules, one that is not split, or a tensor that stands by itself.
    pub(super) fn largest(&self, nodes: impl IntoIterator<Item = NodeId>) -> Largest {
        let mut largest = Largest::default();
        let mut stack: Vec<NodeId> = nodes.into_iter().collect();
        stack.reverse();
        while let Some(id) = stack.pop() {
            if self.is_splittable(id) {
                stack.extend(self.tree.nodes[id].children.iter().rev());
            } else if self.sizes[id] > largest.bits {
                largest = Largest { bits: self.sizes[id], layers: vec![id] };
            } else if self.sizes[id] == largest.bits {
                largest.layers.push(id);
            }
        }
        largest
    }

    /// The tensors outside of a node that are tied to one within.
    pub(super) fn ties_outside(&self, id: NodeId) -> Vec<NodeId> {
        let mut outside = Vec::new();
        for group in &self.tree.ties {
            let others = group.iter().copied().filter(|&tensor| !self.tree.is_within(tensor, id));
            let num_before = outside.len();
            outside.extend(others);
            if outside.len() - num_before == group.len() {
                outside.truncate(num_before);
            }
        }
        outside
    }

    /// The nodes of a queue that hold these tied tensors, one for each, and the size of `id` together with them.
    pub(super) fn with_partners(&self, id: NodeId, ties: &[NodeId], queue: &VecDeque<NodeId>) -> (i128, Vec<NodeId>) {
        let mut bits = self.sizes[id];
        let mut partners = Vec::new();
        for &tied in ties {
            let Some(&partner) = queue.iter().find(|&&node| self.tree.is_within(tied, node)) else { continue };
            bits += self.sizes[partner] - self.sizes[tied];
            partners.push(partner);
        }
        (bits, partners)
    }
}
