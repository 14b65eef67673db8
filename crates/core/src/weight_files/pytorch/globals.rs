//! The names of functions, classes and constants that a pickle may have.

use safetensors::Dtype;

/// What a pickle may do with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Nothing but to have it: element types, and classes that are told of.
    Constant,
    /// To call it with arguments, which are kept beside the name.
    Call,
    /// To make an object of it without arguments, and to give that a state.
    Object,
    /// To call it without arguments, for a dictionary.
    Dictionary,
    /// To call it, for something that is of no use here and has a place among what is: NumPy's arrays among random states.
    Opaque,
    /// To call it with an enumeration that may be called and the name of a member: how Python 3.11.0 to 3.11.3 write a member.
    Member,
}

/// A name of [`GLOBALS`], by its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Global(u8);

/// What PyTorch calls an element type, and the class of its storage if it has one of its own.
pub(super) fn names_of(dtype: Dtype) -> Option<(&'static str, Option<&'static str>)> {
    let (names, _) = DTYPES.iter().find(|(_, known)| *known == dtype)?;
    Some((names.first()?, names.get(1).copied()))
}

impl Global {
    pub(super) fn find(module: &str, name: &str) -> Option<Self> {
        if name.contains('.') {
            return None;
        }
        let is_it = |known: &str| known.strip_suffix(name).and_then(|rest| rest.strip_suffix('.')) == Some(module);
        let place = GLOBALS.iter().position(|(known, _)| is_it(known))?;
        u8::try_from(place).ok().map(Self)
    }

    /// Module and name, with a dot in between.
    pub(super) fn path(self) -> &'static str {
        GLOBALS[usize::from(self.0)].0
    }

    /// Is it an enumeration, whose members PyTorch writes?
    pub(super) fn is_enumeration(self) -> bool {
        self.path().ends_with("MEM_FORMAT_ENCODING")
    }

    pub(super) fn allowed_use(self) -> Use {
        GLOBALS[usize::from(self.0)].1
    }

    /// The element type that this is, or that the elements of this storage have.
    pub(super) fn dtype(self) -> Option<Dtype> {
        let name = self.path().strip_prefix("torch.")?;
        DTYPES.iter().find(|(names, _)| names.contains(&name)).map(|(_, dtype)| *dtype)
    }
}

/// Element types with all the names that they have in `torch`: of the type, and of its storage. Only types that safetensors
/// has as well.
const DTYPES: [(&[&str], Dtype); 19] = [
    (&["float32", "FloatStorage"], Dtype::F32),
    (&["float64", "DoubleStorage"], Dtype::F64),
    (&["float16", "HalfStorage"], Dtype::F16),
    (&["bfloat16", "BFloat16Storage"], Dtype::BF16),
    (&["int64", "LongStorage"], Dtype::I64),
    (&["int32", "IntStorage"], Dtype::I32),
    (&["int16", "ShortStorage"], Dtype::I16),
    (&["int8", "CharStorage"], Dtype::I8),
    (&["uint8", "ByteStorage"], Dtype::U8),
    (&["bool", "BoolStorage"], Dtype::BOOL),
    (&["uint16"], Dtype::U16),
    (&["uint32"], Dtype::U32),
    (&["uint64"], Dtype::U64),
    (&["complex64", "ComplexFloatStorage"], Dtype::C64),
    (&["float8_e4m3fn"], Dtype::F8_E4M3),
    (&["float8_e5m2"], Dtype::F8_E5M2),
    (&["float8_e8m0fnu"], Dtype::F8_E8M0),
    (&["float8_e4m3fnuz"], Dtype::F8_E4M3FNUZ),
    (&["float8_e5m2fnuz"], Dtype::F8_E5M2FNUZ),
];

use Use::{Call, Constant, Dictionary, Member, Object, Opaque};

#[rustfmt::skip]
const GLOBALS: [(&str, Use); 89] = [
    ("collections.OrderedDict", Dictionary),
    ("torch._utils._rebuild_tensor_v2", Call),
    ("torch._utils._rebuild_tensor_v3", Call),
    ("torch._utils._rebuild_parameter", Call),
    ("torch._utils._rebuild_parameter_with_state", Call),
    ("torch._tensor._rebuild_from_type_v2", Call),
    ("torch._utils._rebuild_meta_tensor_no_storage", Call),
    ("torch._utils._rebuild_sparse_tensor", Call),
    ("torch._utils._rebuild_qtensor", Call),
    ("torch.Tensor", Constant),
    ("torch.nn.parameter.Parameter", Constant),
    ("torch.Size", Call),
    ("torch.device", Call),
    ("torch.serialization._get_layout", Call),
    // How protocol 2 writes bytes.
    ("_codecs.encode", Call),
    // What a checkpoint notes of the folder that it was written to.
    ("pathlib.PosixPath", Call), ("pathlib._local.PosixPath", Call),
    ("pathlib.WindowsPath", Call), ("pathlib._local.WindowsPath", Call),
    ("torch.distributed.checkpoint.metadata.Metadata", Object),
    ("torch.distributed.checkpoint.metadata.TensorStorageMetadata", Object),
    ("torch.distributed.checkpoint.metadata.BytesStorageMetadata", Object),
    ("torch.distributed.checkpoint.metadata.ChunkStorageMetadata", Object),
    ("torch.distributed.checkpoint.metadata.TensorProperties", Object),
    ("torch.distributed.checkpoint.metadata.MetadataIndex", Object),
    ("torch.distributed.checkpoint.metadata.StorageMeta", Object),
    ("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", Call),
    ("builtins.getattr", Member), ("__builtin__.getattr", Member),
    ("torch.distributed.checkpoint.filesystem._StorageInfo", Object),
    ("torch.distributed.checkpoint.filesystem._StoragePrefix", Object),
    // Where the properties of tensors were defined until PyTorch 2.2.
    ("torch.distributed._shard.sharded_tensor.metadata.TensorProperties", Object),
    ("torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING", Call),
    ("torch.storage.UntypedStorage", Constant),
    ("torch.FloatStorage", Constant), ("torch.DoubleStorage", Constant), ("torch.HalfStorage", Constant),
    ("torch.BFloat16Storage", Constant), ("torch.LongStorage", Constant), ("torch.IntStorage", Constant),
    ("torch.ShortStorage", Constant), ("torch.CharStorage", Constant), ("torch.ByteStorage", Constant),
    ("torch.BoolStorage", Constant), ("torch.ComplexFloatStorage", Constant), ("torch.ComplexDoubleStorage", Constant),
    ("torch.QInt8Storage", Constant), ("torch.QUInt8Storage", Constant), ("torch.QInt32Storage", Constant),
    ("torch.float32", Constant), ("torch.float64", Constant), ("torch.float16", Constant),
    ("torch.bfloat16", Constant), ("torch.int64", Constant), ("torch.int32", Constant),
    ("torch.int16", Constant), ("torch.int8", Constant), ("torch.uint8", Constant),
    ("torch.bool", Constant), ("torch.uint16", Constant), ("torch.uint32", Constant),
    ("torch.uint64", Constant), ("torch.complex32", Constant), ("torch.complex64", Constant),
    ("torch.complex128", Constant), ("torch.float8_e4m3fn", Constant), ("torch.float8_e5m2", Constant),
    ("torch.float8_e4m3fnuz", Constant), ("torch.float8_e5m2fnuz", Constant), ("torch.float8_e8m0fnu", Constant),
    ("torch.qint8", Constant), ("torch.quint8", Constant), ("torch.qint32", Constant),
    ("torch.per_tensor_affine", Constant), ("torch.per_channel_affine", Constant),
    ("torch.strided", Constant), ("torch.sparse_coo", Constant),
    // What optimizers, schedules and random states have beside tensors.
    ("__builtin__.set", Opaque), ("builtins.set", Opaque),
    ("__builtin__.frozenset", Opaque), ("builtins.frozenset", Opaque),
    ("collections.Counter", Opaque), ("collections.defaultdict", Opaque),
    ("numpy.ndarray", Constant), ("numpy.dtype", Opaque),
    ("numpy._core.multiarray._reconstruct", Opaque), ("numpy.core.multiarray._reconstruct", Opaque),
    ("numpy._core.multiarray.scalar", Opaque), ("numpy.core.multiarray.scalar", Opaque),
];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_found_once_and_told_apart() {
        for (place, (path, _)) in GLOBALS.iter().enumerate() {
            let (module, name) = path.rsplit_once('.').unwrap();
            assert_eq!(usize::from(Global::find(module, name).unwrap().0), place, "{path}");
        }
        for (module, name) in [
            ("os", "system"),
            ("torch", "serialization._get_layout"),
            ("", "torch.Size"),
            ("torch", ""),
            ("torch", "load"),
        ] {
            assert_eq!(Global::find(module, name), None, "{module} {name}");
        }
    }

    #[test]
    fn every_element_type_is_a_name_that_is_read() {
        for (names, dtype) in DTYPES {
            for name in names {
                assert_eq!(Global::find("torch", name).and_then(Global::dtype), Some(dtype), "{name}");
            }
        }
    }
}
