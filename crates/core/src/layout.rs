//! Which elements of a tensor a process holds, and how to make up one layout from others.

use crate::Result;
use crate::error::layout::LayoutErrorKind;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// Which elements of a full tensor a process holds: all of them, a slice of one dim (tensor parallelism), a flat range (a shard
/// of FSDP), or a flat range of a slice (both).
///
/// Elements are counted in row-major order, those of a flat range within what the layout holds otherwise. Elements may come in
/// blocks that share something, such as the scale of quantised numbers: then no flat range cuts through a block.
///
/// ```
/// use accelerate_core::layout::Layout;
///
/// let full = Layout::full([4, 6]);
/// let columns = full.clone().slice(1, 2..4)?;
/// assert_eq!((columns.local_shape(), columns.numel()), (vec![4, 2], 8));
/// let shard = columns.flat(2..5)?;
/// assert_eq!(shard.to_string(), "elements 2..5 of dim 1, 2..4 of [4, 6]");
/// assert_eq!(shard.runs().collect::<Vec<_>>(), [8..10, 14..15]);
/// assert!(full.is_full() && !shard.is_full());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Fields", into = "Fields")]
pub struct Layout {
    shape: Vec<usize>,
    slice: Option<Slice>,
    flat: Option<Range<usize>>,
    block_elements: usize,
}

/// Some indices of one dim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Slice {
    dim: usize,
    indices: Range<usize>,
}

/// A layout as it is written into files, which anybody may have changed.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    shape: Vec<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slice: Option<Slice>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    elements: Option<Range<usize>>,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    block_elements: usize,
}

fn one() -> usize {
    1
}

fn is_one(number: &usize) -> bool {
    *number == 1
}

impl From<Layout> for Fields {
    fn from(layout: Layout) -> Self {
        let Layout { shape, slice, flat, block_elements } = layout;
        Self { shape, slice, elements: flat, block_elements }
    }
}

impl TryFrom<Fields> for Layout {
    type Error = crate::Error;

    fn try_from(fields: Fields) -> Result<Self> {
        let Fields { shape, slice, elements, block_elements } = fields;
        // Counted as if no dim were empty, so that no part of the product is too large.
        if shape.iter().try_fold(1usize, |numel, &size| numel.checked_mul(size.max(1))).is_none() {
            return Err(LayoutErrorKind::TooLarge { shape }.into());
        }
        let mut layout = Self::full(shape).blocks(block_elements)?;
        if let Some(Slice { dim, indices }) = slice {
            layout = layout.slice(dim, indices)?;
        }
        elements.map_or(Ok(layout.clone()), |elements| layout.flat(elements))
    }
}

impl Layout {
    /// All elements of a tensor of this shape; a scalar has no dims.
    pub fn full(shape: impl Into<Vec<usize>>) -> Self {
        Self { shape: shape.into(), slice: None, flat: None, block_elements: 1 }
    }

    /// The same elements, in blocks of this many: flat ranges begin and end at the border of a block, or at the end.
    ///
    /// # Errors
    /// There are no blocks of no elements; a flat range that is there cuts through a block.
    ///
    /// ```
    /// use accelerate_core::layout::Layout;
    /// let blocks = Layout::full([10]).blocks(4)?;
    /// assert!(blocks.clone().flat(4..10).is_ok());
    /// assert!(blocks.flat(2..10).unwrap_err().is_plan());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn blocks(mut self, block_elements: usize) -> Result<Self> {
        if block_elements == 0 {
            return Err(LayoutErrorKind::EmptyBlocks.into());
        }
        self.block_elements = block_elements;
        match self.flat.take() {
            Some(elements) => self.flat(elements),
            None => Ok(self),
        }
    }

    /// Some indices of a dim, and of all other dims everything. Of a full layout.
    ///
    /// # Errors
    /// The layout is not full; there is no such dim, or it has fewer indices.
    pub fn slice(mut self, dim: usize, indices: Range<usize>) -> Result<Self> {
        if self.slice.is_some() || self.flat.is_some() {
            return Err(LayoutErrorKind::SliceOfPart { layout: self.to_string() }.into());
        }
        match self.shape.get(dim) {
            Some(&size) if indices.start <= indices.end && indices.end <= size => {}
            _ => return Err(LayoutErrorKind::NoSuchIndices { dim, indices, shape: self.shape }.into()),
        }
        self.slice = Some(Slice { dim, indices });
        Ok(self)
    }

    /// Some of the elements that the layout holds, counted from its first.
    ///
    /// # Errors
    /// It has fewer elements; the range cuts through a block.
    pub fn flat(self, elements: Range<usize>) -> Result<Self> {
        let held = self.numel();
        if elements.start > elements.end || elements.end > held {
            return Err(LayoutErrorKind::NoSuchElements { elements, layout: self.to_string(), held }.into());
        }
        let is_border = |element: usize| element.is_multiple_of(self.block_elements) || element == held;
        if !is_border(elements.start) || !is_border(elements.end) {
            let block_elements = self.block_elements;
            return Err(LayoutErrorKind::CutBlock { elements, layout: self.to_string(), block_elements }.into());
        }
        let first = self.flat.as_ref().map_or(0, |flat| flat.start);
        Ok(Self { flat: Some(first + elements.start..first + elements.end), ..self })
    }

    /// The same for a range that a plan has computed from the tensor's size.
    pub(crate) fn with_flat(self, elements: Range<usize>) -> Self {
        debug_assert!(elements.end <= self.numel());
        Self { flat: Some(elements), ..self }
    }

    /// Sizes of the full tensor's dims.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Sizes of what is held: `[elements]` for a flat range.
    pub fn local_shape(&self) -> Vec<usize> {
        match &self.flat {
            Some(elements) => vec![elements.len()],
            None => self.slice_shape(),
        }
    }

    /// Number of elements that are held.
    pub fn numel(&self) -> usize {
        self.local_shape().iter().product()
    }

    /// Number of elements of the full tensor.
    pub fn full_numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Are these all elements?
    pub fn is_full(&self) -> bool {
        self.numel() == self.full_numel()
    }

    fn slice_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(Slice { dim, indices }) = &self.slice {
            shape[*dim] = indices.len();
        }
        shape
    }

    /// The elements that are held, as ranges over the full tensor's, in the order in which they are held. No two that follow
    /// each other touch.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let (dim, indices) = match &self.slice {
            Some(Slice { dim, indices }) => (*dim, indices.clone()),
            None => (0, 0..self.shape.first().copied().unwrap_or(1)),
        };
        let size = self.shape.get(dim).copied().unwrap_or(1);
        let inner: usize = self.shape.iter().skip(dim + 1).product();
        // A slice over all indices of its dim is one run, and so is one of the outermost dim.
        let is_one_run = indices.len() == size || self.shape.iter().take(dim).product::<usize>() == 1;
        let (run, step, first) = match is_one_run {
            true => (self.slice_shape().iter().product(), self.full_numel(), indices.start * inner),
            false => (indices.len() * inner, size * inner, indices.start * inner),
        };
        let elements = self.flat.clone().unwrap_or(0..self.slice_shape().iter().product());
        let rows =
            if run == 0 || elements.is_empty() { 0..0 } else { elements.start / run..elements.end.div_ceil(run) };
        rows.map(move |row| {
            let (start, end) = (elements.start.max(row * run), elements.end.min((row + 1) * run));
            let at = |element: usize| row * step + first + (element - row * run);
            at(start)..at(end)
        })
    }

    /// How to put these elements together from those of `pieces`, which may overlap (replicas hold the same) and come in any
    /// order. Only pieces of the same tensor make sense: shapes are not compared.
    ///
    /// # Errors
    /// The first elements of the full tensor that no piece has.
    ///
    /// ```
    /// use accelerate_core::layout::{Copied, Layout};
    /// let full = Layout::full([3, 3]);
    /// let pieces = [full.clone().flat(4..9)?, full.clone().flat(0..4)?];
    /// let copies = full.clone().slice(0, 1..2)?.copies_from(&pieces).unwrap();
    /// assert_eq!(copies, [
    ///     Copied { source: 1, from: 3..4, to: 0 },
    ///     Copied { source: 0, from: 0..2, to: 1 },
    /// ]);
    /// assert_eq!(full.copies_from(&pieces[1..]), Err(4..9));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn copies_from<'a>(&self, pieces: impl IntoIterator<Item = &'a Layout>) -> Result<Vec<Copied>, Range<usize>> {
        let mut sources = Vec::new();
        for (source, piece) in pieces.into_iter().enumerate() {
            let mut held = 0;
            for run in piece.runs() {
                let from = held;
                held += run.len();
                sources.push(Run { run, source, from });
            }
        }
        sources.sort_by_key(|source| source.run.start);
        let mut copies = Vec::new();
        let (mut to, mut begun, mut farthest) = (0, 0, None::<&Run>);
        for wanted in self.runs() {
            let mut next = wanted.start;
            while next < wanted.end {
                while let Some(source) = sources.get(begun).filter(|source| source.run.start <= next) {
                    if farthest.is_none_or(|known| known.run.end < source.run.end) {
                        farthest = Some(source);
                    }
                    begun += 1;
                }
                let Some(Run { run, source, from }) = farthest.filter(|known| known.run.end > next) else {
                    let later = sources.get(begun).map_or(wanted.end, |source| source.run.start);
                    return Err(next..later.min(wanted.end));
                };
                let end = run.end.min(wanted.end);
                let from = from + (next - run.start)..from + (end - run.start);
                copies.push(Copied { source: *source, to, from });
                to += end - next;
                next = end;
            }
        }
        Ok(copies)
    }
}

/// Elements of the full tensor that one piece holds one behind the other.
struct Run {
    run: Range<usize>,
    source: usize,
    /// Where the first of them stands in the piece.
    from: usize,
}

/// Elements to copy from one of several pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Which piece.
    pub source: usize,
    /// Its elements, counted from its first.
    pub from: Range<usize>,
    /// Where the first of them goes, counted from the first that is wanted.
    pub to: usize,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(elements) = &self.flat {
            write!(f, "elements {elements:?} of ")?;
        }
        if let Some(Slice { dim, indices }) = &self.slice {
            write!(f, "dim {dim}, {indices:?} of ")?;
        }
        write!(f, "{:?}", self.shape)
    }
}
