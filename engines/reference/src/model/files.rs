//! safetensors files: which tensor lies where, and reading one as f32.
//!
//! Files are read, not mapped: a file that another process cuts short is then an error and not a
//! signal, and what was read is converted at once anyway.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;

use super::ModelError;

/// As the format's own reader has it.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// A tensor is read and converted in pieces of this size; whole values of every type.
const PIECE_BYTES: usize = 1 << 20;

/// The weight files of a folder, opened, with their headers checked against their lengths.
#[derive(Debug)]
pub(super) struct WeightFiles {
    dir: PathBuf,
    /// Sorted by name.
    files: Vec<WeightFile>,
    /// Tensor name to file and place.
    tensors: BTreeMap<String, (usize, TensorInfo)>,
}

#[derive(Debug)]
pub(super) struct WeightFile {
    pub path: PathBuf,
    pub file: File,
    pub bytes: u64,
    /// Where the tensors' bytes begin.
    pub data_at: u64,
}

impl WeightFiles {
    /// Opens `model.safetensors`, or the files that `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// [`ModelError`]
    pub(super) fn open(dir: &Path) -> Result<Self, ModelError> {
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        let paths =
            if !single.exists() && index.exists() { indexed(dir, &index)? } else { vec![single] };
        let mut files = Vec::new();
        let mut tensors = BTreeMap::new();
        for path in paths {
            let (file, metadata) = WeightFile::open(path)?;
            for (name, info) in metadata.tensors() {
                tensors.insert(name, (files.len(), info.clone()));
            }
            files.push(file);
        }
        Ok(WeightFiles { dir: dir.to_path_buf(), files, tensors })
    }

    pub(super) fn files(&self) -> &[WeightFile] {
        &self.files
    }

    /// Checks that a tensor is there with a shape and a type that can be read.
    ///
    /// # Errors
    /// [`ModelError::Damaged`] names the tensor.
    pub(super) fn check(&self, name: &str, shape: &[usize]) -> Result<(), ModelError> {
        self.find(name, shape).map(|_| ())
    }

    fn find(&self, name: &str, shape: &[usize]) -> Result<(&WeightFile, &TensorInfo), ModelError> {
        let Some((file, info)) = self.tensors.get(name) else {
            let path = match &self.files[..] {
                [one] => one.path.clone(),
                _ => self.dir.clone(),
            };
            return Err(ModelError::Damaged { path, why: format!("tensor {name} is missing") });
        };
        let file = &self.files[*file];
        let damaged = |why| ModelError::Damaged { path: file.path.clone(), why };
        if info.shape != shape {
            let why =
                format!("tensor {name} has shape {:?}; config.json requires {shape:?}", info.shape);
            return Err(damaged(why));
        }
        if !matches!(info.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            let why = format!(
                "tensor {name} has type {:?}; only F32, F16 and BF16 are supported",
                info.dtype
            );
            return Err(ModelError::Unsupported { path: file.path.clone(), why });
        }
        Ok((file, info))
    }

    /// Appends a tensor's values to `values`.
    ///
    /// # Errors
    /// [`ModelError`] names the tensor or the file.
    pub(super) fn read(
        &self,
        name: &str,
        shape: &[usize],
        values: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let (file, info) = self.find(name, shape)?;
        let (from, to) = info.data_offsets;
        values.reserve(shape.iter().product());
        let mut piece = vec![0u8; PIECE_BYTES.min(to - from)];
        let mut at = from;
        while at < to {
            let piece = &mut piece[..PIECE_BYTES.min(to - at)];
            file.read_at(piece, file.data_at + at as u64)?;
            match info.dtype {
                Dtype::BF16 => widen(piece, values, |b| bf16::from_le_bytes(b).to_f32()),
                Dtype::F16 => widen(piece, values, |b| f16::from_le_bytes(b).to_f32()),
                _ => widen(piece, values, f32::from_le_bytes),
            }
            at += piece.len();
        }
        Ok(())
    }
}

fn widen<const N: usize>(bytes: &[u8], values: &mut Vec<f32>, convert: fn([u8; N]) -> f32) {
    let (numbers, _) = bytes.as_chunks::<N>();
    values.extend(numbers.iter().map(|number| convert(*number)));
}

impl WeightFile {
    fn open(path: PathBuf) -> Result<(Self, Metadata), ModelError> {
        let read = |source| ModelError::Read { path: path.clone(), source };
        let damaged = |why| ModelError::Damaged { path: path.clone(), why };
        let mut file = File::open(&path).map_err(read)?;
        let bytes = file.metadata().map_err(read)?.len();
        let mut length = [0; 8];
        if bytes < length.len() as u64 {
            return Err(damaged(format!(
                "the file is truncated: {bytes} bytes are not a safetensors file"
            )));
        }
        file.read_exact(&mut length).map_err(read)?;
        let header_bytes = u64::from_le_bytes(length);
        let data_at = header_bytes.saturating_add(8);
        if header_bytes > HEADER_BYTES_MAX {
            return Err(damaged("it is not a safetensors file: the header is too long".into()));
        }
        if data_at > bytes {
            return Err(damaged("the file is truncated within the header".into()));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header).map_err(read)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|e| damaged(format!("cannot read the header: {e}")))?;
        let needed = data_at + metadata.data_len() as u64;
        if bytes != needed {
            let how = if bytes < needed { "the file is truncated" } else { "the file is too long" };
            return Err(damaged(format!(
                "{how}: it has {bytes} bytes, but the header requires {needed}"
            )));
        }
        Ok((WeightFile { path, file, bytes, data_at }, metadata))
    }

    pub(super) fn read_at(&self, into: &mut [u8], at: u64) -> Result<(), ModelError> {
        self.file
            .read_exact_at(into, at)
            .map_err(|source| ModelError::Read { path: self.path.clone(), source })
    }
}

/// The files of an index, sorted; each lies in the folder itself.
fn indexed(dir: &Path, index: &Path) -> Result<Vec<PathBuf>, ModelError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let path = || index.to_path_buf();
    let text = std::fs::read(index).map_err(|source| ModelError::Read { path: path(), source })?;
    let index: Index = serde_json::from_slice(&text)
        .map_err(|e| ModelError::Damaged { path: path(), why: e.to_string() })?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    if names.is_empty() {
        return Err(ModelError::Damaged { path: path(), why: "it contains no file names".into() });
    }
    if let Some(name) =
        names.iter().find(|name| Path::new(name).file_name() != Some((*name).as_ref()))
    {
        let why = format!("it contains {name:?}, which is not a file of this directory");
        return Err(ModelError::Damaged { path: path(), why });
    }
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}
