//! Which elements of a tensor a process holds, and how to make up one layout from others.

use crate::Result;
use crate::error::layout::LayoutErrorKind;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// Which elements of a full tensor a process holds: all of them, a slice of one dim (tensor parallelism), a flat range (a shard
/// of FSDP), or a flat range of a slice (both). A dim may consist of several equal parts, such as the queries, keys and values of
/// one product; then a slice is of each of them.
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

/// Some indices of each of the equal parts that one dim consists of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Slice {
    dim: usize,
    indices: Range<usize>,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    parts: usize,
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
        if let Some(Slice { dim, indices, parts }) = slice {
            layout = layout.slice_of_parts(dim, parts, indices)?;
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
    pub fn slice(self, dim: usize, indices: Range<usize>) -> Result<Self> {
        self.slice_of_parts(dim, 1, indices)
    }

    /// The same of a dim that consists of `parts` equal parts: these indices of each part, one part after the other.
    ///
    /// ```
    /// use accelerate_core::layout::Layout;
    /// // Queries, keys and values of two heads of two features, of which this process has the second.
    /// let second_head = Layout::full([12]).slice_of_parts(0, 3, 2..4)?;
    /// assert_eq!(second_head.runs().collect::<Vec<_>>(), [2..4, 6..8, 10..12]);
    /// assert_eq!(second_head.local_shape(), [6]);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`slice`](Self::slice); a dim that is not divided evenly.
    pub fn slice_of_parts(mut self, dim: usize, parts: usize, indices: Range<usize>) -> Result<Self> {
        if self.slice.is_some() || self.flat.is_some() {
            return Err(LayoutErrorKind::SliceOfPart { layout: self.to_string() }.into());
        }
        match self.shape.get(dim) {
            Some(&size) if parts == 0 || !size.is_multiple_of(parts) => {
                return Err(LayoutErrorKind::UnevenParts { dim, parts, shape: self.shape }.into());
            }
            Some(&size) if indices.start <= indices.end && indices.end <= size / parts => {}
            _ => return Err(LayoutErrorKind::NoSuchIndices { dim, indices, shape: self.shape }.into()),
        }
        self.slice = Some(Slice { dim, indices, parts });
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

    /// The elements that this layout holds, as a tensor of their own of which `part` holds some.
    ///
    /// ```
    /// use accelerate_core::layout::Layout;
    /// let slice = Layout::full([4, 6]).slice(1, 2..4)?;
    /// assert_eq!(slice.clone().part(&Layout::full([8]).flat(2..5)?)?, slice.clone().flat(2..5)?);
    /// assert_eq!(slice.clone().part(&Layout::full([8]))?, slice);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `part` is of more elements, or a slice.
    pub fn part(self, part: &Layout) -> Result<Self> {
        match (&part.slice, &part.flat) {
            (None, None) if part.numel() == self.numel() => Ok(self),
            (None, Some(elements)) => self.flat(elements.clone()),
            _ => Err(LayoutErrorKind::SliceOfPart { layout: self.to_string() }.into()),
        }
    }

    /// The same for a range that a plan has computed from the tensor's size.
    pub(crate) fn with_flat(self, elements: Range<usize>) -> Self {
        debug_assert!(elements.end <= self.numel());
        Self { flat: Some(elements), ..self }
    }

    /// The same without a flat range: what the range is taken from, and the range, which is all of it if there is none.
    pub(crate) fn ranged(&self) -> (Self, Range<usize>) {
        let whole = Self { flat: None, ..self.clone() };
        let range = self.flat.clone().unwrap_or_else(|| 0..whole.numel());
        (whole, range)
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
        if let Some(Slice { dim, indices, parts }) = &self.slice {
            shape[*dim] = indices.len() * parts;
        }
        shape
    }

    /// The elements that are held, as ranges over the full tensor's, in the order in which they are held. No two that follow
    /// each other touch.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let (dim, indices, parts) = match &self.slice {
            Some(Slice { dim, indices, parts }) => (*dim, indices.clone(), *parts),
            None => (0, 0..self.shape.first().copied().unwrap_or(1), 1),
        };
        // Of one part, as if the parts were a dim of their own.
        let size = self.shape.get(dim).copied().unwrap_or(1) / parts;
        let inner: usize = self.shape.iter().skip(dim + 1).product();
        // A slice over all indices of its dim is one run, and so is one of the outermost dim.
        let is_one_run = indices.len() == size || self.shape.iter().take(dim).product::<usize>() * parts == 1;
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
        if let Some(Slice { dim, indices, parts }) = &self.slice {
            write!(f, "dim {dim}, {indices:?} of ")?;
            if *parts > 1 {
                write!(f, "each of its {parts} parts, of ")?;
            }
        }
        write!(f, "{:?}", self.shape)
    }
}
