//! Plans for stacks of attention and feed-forward layers whose layers have the names that such layers usually have.

use super::{LayerEntry, LayerKind, LayerRule, ParallelStyle, TensorParallelPlan};
use crate::Result;
use crate::error::tensor_parallel::TensorParallelErrorKind as Kind;
use std::collections::BTreeMap;

/// Paths within a block: what makes queries, keys and values, and what takes their result.
const ATTENTION: [([&str; 3], &str); 7] = [
    (["q_proj", "k_proj", "v_proj"], "o_proj"),
    (["q_proj", "k_proj", "v_proj"], "out_proj"),
    (["wq", "wk", "wv"], "wo"),
    (["q_lin", "k_lin", "v_lin"], "out_lin"),
    (["to_q", "to_k", "to_v"], "to_out"),
    (["self.query", "self.key", "self.value"], "output.dense"),
    (["attention.query", "attention.key", "attention.value"], "output.dense"),
];

/// The same where one product makes queries, then keys, then values.
const PACKED_ATTENTION: [(&str, &str); 4] =
    [("c_attn", "c_proj"), ("qkv_proj", "o_proj"), ("qkv", "proj"), ("in_proj", "out_proj")];

/// What makes inner features, at least one of these names, and what takes them.
const FEED_FORWARD: [(&[&str], &str); 8] = [
    (&["up_proj", "gate_proj"], "down_proj"),
    (&["up", "gate"], "down"),
    (&["fc1"], "fc2"),
    (&["c_fc"], "c_proj"),
    (&["w1", "w3"], "w2"),
    (&["lin1"], "lin2"),
    (&["linear1"], "linear2"),
    (&["intermediate.dense"], "output.dense"),
];

/// Tables of words, and the layers that say which word is next.
const TABLES: [&str; 5] = ["embed_tokens", "wte", "tok_embeddings", "word_embeddings", "token_embedding"];
const HEADS: [&str; 1] = ["lm_head"];

impl TensorParallelPlan {
    /// The plan of a model without one of its own, by the names of its layers (`tp_plan: auto`): attention and feed-forward layers that are
    /// found by path are divided, colwise in front and rowwise behind, and so are a table of words and a head beside it. All other
    /// layers stay whole. `head_dim` is the number of features of a head, which no layer says; heads stay whole, and with them the heads
    /// of queries that share one of keys.
    ///
    /// ```
    /// use accelerate_core::tensor_parallel::{LayerEntry, LayerKind, TensorParallelPlan};
    /// let layers = [("blocks.0.mlp.fc1", [16, 4]), ("blocks.0.mlp.fc2", [4, 16])]
    ///     .map(|(path, sizes)| LayerEntry::new(path, LayerKind::Linear, sizes));
    /// let divided = TensorParallelPlan::of_stack(&layers, None)?.divide(&layers, 2)?;
    /// assert_eq!(divided.len(), 2);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::is_plan`](crate::Error::is_plan): nothing was found that could be divided; attention was found, and nobody says how wide
    /// a head is, or its features are no whole heads.
    pub fn of_stack(layers: &[LayerEntry], head_dim: Option<usize>) -> Result<Self> {
        let linear: BTreeMap<&str, [usize; 2]> = layers
            .iter()
            .filter(|layer| layer.kind == LayerKind::Linear)
            .map(|layer| (layer.path.as_str(), layer.sizes))
            .collect();
        let mut plan = Self::default();
        for (path, sizes) in &linear {
            for (first, last) in ATTENTION {
                let Some(block) = path.strip_suffix(last).filter(|block| is_block(block)) else { continue };
                let found = first.map(|name| linear.get(format!("{block}{name}").as_str()).copied());
                let [Some(query), Some(key), Some(value)] = found else { continue };
                if query[0] == sizes[1] && key[0] == value[0] {
                    let head_dim = whole_heads(path, head_dim, &[query[0], key[0]])?;
                    // No head of keys serves a part of a head of queries.
                    if !query[0].is_multiple_of(key[0]) {
                        continue;
                    }
                    let group = (query[0] / key[0]).max(1).saturating_mul(head_dim);
                    let units = [group, head_dim, head_dim];
                    for (name, unit) in first.into_iter().zip(units) {
                        plan = plan
                            .with(format!("{block}{name}"), LayerRule::from(ParallelStyle::Colwise).with_unit(unit));
                    }
                    plan = plan.with(*path, LayerRule::from(ParallelStyle::Rowwise).with_unit(group));
                }
            }
            for (first, last) in PACKED_ATTENTION {
                let Some(block) = path.strip_suffix(last).filter(|block| is_block(block)) else { continue };
                let packed = format!("{block}{first}");
                if linear.get(packed.as_str()).is_some_and(|found| Some(found[0]) == sizes[1].checked_mul(3)) {
                    let head_dim = whole_heads(path, head_dim, &[sizes[1]])?;
                    let rule = LayerRule::from(ParallelStyle::PackedColwise).with_parts(3).with_unit(head_dim);
                    plan = plan.with(packed, rule);
                    plan = plan.with(*path, LayerRule::from(ParallelStyle::Rowwise).with_unit(head_dim));
                }
            }
            for (first, last) in FEED_FORWARD {
                let Some(block) = path.strip_suffix(last).filter(|block| is_block(block)) else { continue };
                let inner = |name: &&str| linear.get(format!("{block}{name}").as_str()).map(|found| found[0]);
                let found: Vec<(&str, usize)> = first.iter().filter_map(|name| Some((*name, inner(name)?))).collect();
                if !found.is_empty() && found.iter().all(|(_, features)| *features == sizes[1]) {
                    for (name, _) in found {
                        plan = plan.with(format!("{block}{name}"), ParallelStyle::Colwise);
                    }
                    plan = plan.with(*path, ParallelStyle::Rowwise);
                }
            }
        }
        if plan.is_empty() {
            let known = layers.iter().map(|layer| layer.path.clone()).collect();
            return Err(Kind::NothingToDivide { known }.into());
        }
        Ok(plan.with_words(layers))
    }

    /// A table of words and heads of as many words.
    fn with_words(mut self, layers: &[LayerEntry]) -> Self {
        let is_named =
            |layer: &LayerEntry, names: &[&str]| names.contains(&layer.path.rsplit('.').next().unwrap_or(&layer.path));
        let tables = layers.iter().filter(|layer| layer.kind == LayerKind::Embedding && is_named(layer, &TABLES));
        for table in tables {
            let is_head = |layer: &&LayerEntry| {
                layer.kind == LayerKind::Linear && is_named(layer, &HEADS) && layer.sizes == table.sizes
            };
            // A head of another name may share the table's weight, and would be whole.
            let shares = |layer: &&LayerEntry| layer.weight == table.weight && layer.path != table.path;
            let heads: Vec<&LayerEntry> = layers.iter().filter(is_head).collect();
            if layers.iter().filter(shares).all(|layer| is_head(&layer)) {
                self = self.with(table.path.clone(), ParallelStyle::EmbeddingRowwise);
                self = heads
                    .into_iter()
                    .fold(self, |plan, head| plan.with(head.path.clone(), ParallelStyle::ColwiseGatherOutput));
            }
        }
        self
    }
}

/// Is this the path of a block, with the dot behind it, or nothing at all?
fn is_block(prefix: &str) -> bool {
    prefix.is_empty() || prefix.ends_with('.')
}

/// How wide heads are, if all of these features are whole ones.
fn whole_heads(path: &str, head_dim: Option<usize>, features: &[usize]) -> Result<usize> {
    match head_dim {
        None => Err(Kind::NoHeadDim { layer: path.to_owned() }.into()),
        Some(width) if width > 0 && features.iter().all(|&features| features > 0 && features.is_multiple_of(width)) => {
            Ok(width)
        }
        Some(width) => {
            let features = features.first().copied().unwrap_or_default();
            Err(Kind::CutUnit { layer: path.to_owned(), features, unit: width, parts: 1 }.into())
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn linear(paths: &[(&str, [usize; 2])]) -> Vec<LayerEntry> {
        paths.iter().map(|(path, sizes)| LayerEntry::new(*path, LayerKind::Linear, *sizes)).collect()
    }

    /// Path, style and unit of each rule, by path.
    fn rules(plan: &TensorParallelPlan) -> Vec<(String, &'static str, usize)> {
        let mut rules: Vec<_> =
            plan.rules.iter().map(|(path, rule)| (path.clone(), rule.style.as_str(), rule.unit)).collect();
        rules.sort();
        rules
    }

    #[test]
    fn attention_and_feed_forward_layers_are_found_by_path() {
        let layers = linear(&[
            ("h.0.attn.q_proj", [24, 16]),
            ("h.0.attn.k_proj", [8, 16]),
            ("h.0.attn.v_proj", [8, 16]),
            ("h.0.attn.o_proj", [16, 24]),
            ("h.0.mlp.gate_proj", [40, 16]),
            ("h.0.mlp.up_proj", [40, 16]),
            ("h.0.mlp.down_proj", [16, 40]),
            ("h.0.router", [3, 16]),
        ]);
        let plan = TensorParallelPlan::of_stack(&layers, Some(4)).unwrap();
        let wanted = [
            ("h.0.attn.k_proj", "colwise", 4),
            ("h.0.attn.o_proj", "rowwise", 12),
            ("h.0.attn.q_proj", "colwise", 12),
            ("h.0.attn.v_proj", "colwise", 4),
            ("h.0.mlp.down_proj", "rowwise", 1),
            ("h.0.mlp.gate_proj", "colwise", 1),
            ("h.0.mlp.up_proj", "colwise", 1),
        ];
        assert_eq!(rules(&plan), wanted.map(|(path, style, unit)| (path.to_owned(), style, unit)));
        assert_eq!(plan.divide(&layers, 2).unwrap()[0].slices, [0..12, 12..24]);
    }

    #[rstest]
    #[case(&[("c_attn", [24, 8]), ("c_proj", [8, 8])], &[("c_attn", "packed_colwise", 4), ("c_proj", "rowwise", 4)])]
    #[case(&[("a.fc1", [6, 4]), ("a.fc2", [4, 6]), ("b.fc1", [6, 4]), ("b.fc2", [4, 5])], &[("a.fc1", "colwise", 1), ("a.fc2", "rowwise", 1)])]
    #[case(&[("w1", [6, 4]), ("w2", [4, 6])], &[("w1", "colwise", 1), ("w2", "rowwise", 1)])]
    #[case(&[("a.w1", [6, 4]), ("a.w3", [5, 4]), ("a.w2", [4, 6]), ("fc1", [6, 4]), ("fc2", [4, 6])], &[("fc1", "colwise", 1), ("fc2", "rowwise", 1)])]
    #[case(
        &[("l.attention.self.query", [8, 8]), ("l.attention.self.key", [8, 8]), ("l.attention.self.value", [8, 8]), ("l.attention.output.dense", [8, 8]),
          ("l.intermediate.dense", [9, 8]), ("l.output.dense", [8, 9])],
        &[("l.attention.output.dense", "rowwise", 4), ("l.attention.self.key", "colwise", 4), ("l.attention.self.query", "colwise", 4),
          ("l.attention.self.value", "colwise", 4), ("l.intermediate.dense", "colwise", 1), ("l.output.dense", "rowwise", 1)]
    )]
    #[case(&[("xfc1", [6, 4]), ("fc2", [4, 6]), ("lin1", [6, 4]), ("lin2", [4, 6])], &[("lin1", "colwise", 1), ("lin2", "rowwise", 1)])]
    fn names_and_sizes_have_to_fit(
        #[case] layers: &[(&str, [usize; 2])],
        #[case] wanted: &[(&str, &'static str, usize)],
    ) {
        let plan = TensorParallelPlan::of_stack(&linear(layers), Some(4)).unwrap();
        let wanted: Vec<_> = wanted.iter().map(|&(path, style, unit)| (path.to_owned(), style, unit)).collect();
        assert_eq!(rules(&plan), wanted);
    }

    #[rstest]
    #[case("lm_head", "lm_head.weight", true)]
    #[case("lm_head", "wte.weight", true)]
    // Tied to a head that stays whole.
    #[case("classifier", "wte.weight", false)]
    fn words_are_divided_where_all_that_share_them_are(
        #[case] head: &str,
        #[case] weight: &str,
        #[case] divides: bool,
    ) {
        let mut layers = linear(&[("fc1", [6, 4]), ("fc2", [4, 6])]);
        layers.push(LayerEntry::new("wte", LayerKind::Embedding, [11, 4]));
        let own = LayerEntry::new(head, LayerKind::Linear, [11, 4]);
        layers.push(LayerEntry { weight: weight.to_owned(), ..own });
        let plan = TensorParallelPlan::of_stack(&layers, None).unwrap();
        assert_eq!(plan.divide(&layers, 2).unwrap().len(), if divides { 4 } else { 2 });
    }

    #[rstest]
    #[case(&[("wq", [12, 4]), ("wk", [8, 4]), ("wv", [8, 4]), ("wo", [4, 12])], Some(4), "no attention or feed-forward layers were found")]
    #[case(&[("fc1", [6, 4]), ("fc2", [4, 5])], Some(4), "no attention or feed-forward layers were found")]
    #[case(&[("wq", [8, 4]), ("wk", [8, 4]), ("wv", [8, 4]), ("wo", [4, 8])], None, "\"head_dim\"")]
    #[case(&[("wq", [8, 4]), ("wk", [8, 4]), ("wv", [8, 4]), ("wo", [4, 8])], Some(3), "whole units of 3")]
    #[case(&[("wq", [8, 4]), ("wk", [8, 4]), ("wv", [8, 4]), ("wo", [4, 8])], Some(0), "whole units of 0")]
    #[case(&[("wq", [0, 4]), ("wk", [0, 4]), ("wv", [0, 4]), ("wo", [4, 0])], Some(2), "0 features")]
    fn what_is_not_known_is_asked_for(
        #[case] layers: &[(&str, [usize; 2])],
        #[case] head_dim: Option<usize>,
        #[case] words: &str,
    ) {
        let error = TensorParallelPlan::of_stack(&linear(layers), head_dim).unwrap_err();
        assert!(error.is_plan() && error.to_string().contains(words), "{error}");
    }
}
