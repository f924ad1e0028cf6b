//! Rows, queries and results in a GPU's memory, for tests and measurements.

use kvasir_attention::Partial;
use kvasir_attention::cuda::{CudaError, CudaJob};
use kvasir_cuda::{Memory, Stream};

use crate::slots::Slots;

fn upload<T: Copy>(stream: &Stream, values: &[T]) -> Result<Memory, CudaError> {
    let memory = Memory::new(stream.device(), size_of_val(values))?;
    memory.write(values, stream)?;
    Ok(memory)
}

/// Rows in device memory.
#[derive(Debug)]
pub(crate) struct DeviceRows {
    _memory: Memory,
    pages: Memory,
    rows: u32,
    rows_per_page: u32,
    row_stride_bytes: u32,
}

impl DeviceRows {
    pub(crate) fn of(stream: &Stream, slots: &Slots) -> Result<DeviceRows, CudaError> {
        let memory = upload(stream, slots.memory())?;
        let pages = upload(stream, &slots.pages(memory.address()))?;
        Ok(DeviceRows {
            _memory: memory,
            pages,
            rows: slots.rows,
            rows_per_page: slots.rows_per_page,
            row_stride_bytes: slots.row_stride_bytes,
        })
    }
}

/// A query and the memory of its result.
#[derive(Debug)]
pub(crate) struct DeviceQuery {
    _query: Memory,
    _selected: Option<Memory>,
    o: Memory,
    m: Memory,
    l: Memory,
    pub job: CudaJob,
}

impl DeviceQuery {
    pub(crate) fn new(
        stream: &Stream,
        rows: &DeviceRows,
        query: &Slots,
        selected: Option<&[u32]>,
        d_v: usize,
        scale: f32,
    ) -> Result<DeviceQuery, CudaError> {
        let count = query.rows as usize;
        let memory = upload(stream, query.memory())?;
        let selected_rows = selected.map_or(0, |selected| selected.len() as u32);
        let selected = selected.map(|selected| upload(stream, selected)).transpose()?;
        // What is not written is NaN afterwards.
        let o = upload(stream, &vec![f32::NAN; count * d_v])?;
        let (m, l) =
            (upload(stream, &vec![f32::NAN; count])?, upload(stream, &vec![f32::NAN; count])?);
        let job = CudaJob {
            query: query.pages(memory.address()).first().copied().unwrap_or(0),
            query_rows: query.rows,
            query_stride_bytes: query.row_stride_bytes,
            pages: rows.pages.address(),
            page_rows: rows.rows,
            rows_per_page: rows.rows_per_page,
            row_stride_bytes: rows.row_stride_bytes,
            selected: selected.as_ref().map(Memory::address),
            selected_rows,
            visible: None,
            scale,
            o: o.address(),
            m: m.address(),
            l: l.address(),
        };
        Ok(DeviceQuery { _query: memory, _selected: selected, o, m, l, job })
    }

    pub(crate) fn read(&self, stream: &Stream, d_v: usize) -> Result<Partial, CudaError> {
        let mut out = Partial::empty(self.job.query_rows as usize, d_v);
        self.o.read(&mut out.o, stream)?;
        self.m.read(&mut out.m, stream)?;
        self.l.read(&mut out.l, stream)?;
        Ok(out)
    }
}
