//! A store node's memory for programs that are not written in Rust: `kvasir-client` for whoever keeps objects
//! there, and the attach of engines (`kvasir-attach`, in [`engine`]). `include/kvasir.h` and
//! `include/kvasir_engine.h` are the documentation; a test compiles programs against them and runs them, and
//! checks that headers and source name the same functions and numbers.
//!
//! Pointers are the caller's word: each function says which it reads and writes. No panic crosses into C:
//! one that happens is a [`Status::Protocol`].

#![allow(unreachable_pub, reason = "programs in C call what Rust code cannot reach")]

mod engine;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use kvasir_client::{Class, Client, Error, Key, Object, OpenOptions, Outcome, PutOptions, Tier};

/// `kvasir_status`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Ok = 0,
    Unreachable = 1,
    Refused = 2,
    Lost = 3,
    NoCapacity = 4,
    Draining = 5,
    Invalid = 6,
    Protocol = 7,
}

/// `kvasir_bytes`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Bytes {
    data: *const u8,
    bytes: usize,
}

/// `kvasir_open_options`.
#[repr(C)]
#[derive(Debug)]
pub struct COpenOptions {
    attach_dir: *const c_char,
    tenant: *const c_char,
    name_space: *const c_char,
    object_bytes_max: u64,
    polling_us: u64,
}

/// `kvasir_put_options`.
#[repr(C)]
#[derive(Debug)]
pub struct CPutOptions {
    object_class: c_int,
    ttl_ms: u64,
}

/// `kvasir_object`.
#[repr(C)]
#[derive(Debug)]
pub struct CObject {
    data: *const u8,
    bytes: usize,
    offset_bytes: u64,
    generation: u32,
}

/// `kvasir_batch`.
#[derive(Debug)]
pub struct Batch {
    objects: Vec<Option<Object>>,
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// What went wrong, before it is told.
struct Failed(Status, String);

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        let status = match error {
            Error::Unreachable(_) => Status::Unreachable,
            Error::Refused(_) => Status::Refused,
            Error::Lost => Status::Lost,
            Error::NoCapacity(_) => Status::NoCapacity,
            Error::Draining(_) => Status::Draining,
            Error::TooMany { .. } | Error::TooLarge { .. } | Error::Invalid(_) => Status::Invalid,
            Error::Protocol(_) => Status::Protocol,
        };
        Failed(status, error.to_string())
    }
}

fn invalid(why: impl Into<String>) -> Failed {
    Failed(Status::Invalid, why.into())
}

fn note(why: String) {
    // A zero within it would end it early.
    let why = CString::new(why.replace('\0', " ")).unwrap_or_default();
    LAST_ERROR.with(|last| *last.borrow_mut() = why);
}

fn guarded(call: impl FnOnce() -> Result<(), Failed>) -> Status {
    let failed = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(failed)) => failed,
        Err(_) => Failed(Status::Protocol, "a bug: the call panicked".into()),
    };
    note(failed.1);
    failed.0
}

/// A C string; `None` for NULL.
///
/// # Safety
/// `text` is NULL or ends with a zero, and nobody writes it meanwhile.
unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>, Failed> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL; the caller promises the rest.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| invalid(format!("{what} is not UTF-8")))
}

/// An array of `count`.
///
/// # Safety
/// `first` is NULL or leads to `count` of them, which nobody writes while the slice is used.
unsafe fn array<'a, T>(first: *const T, count: usize, what: &str) -> Result<&'a [T], Failed> {
    if count == 0 {
        return Ok(&[]);
    }
    if first.is_null() {
        return Err(invalid(format!("`{what}` is NULL")));
    }
    // SAFETY: not NULL; the caller promises the rest.
    Ok(unsafe { std::slice::from_raw_parts(first, count) })
}

/// Bytes of the caller.
///
/// # Safety
/// As [`array`].
unsafe fn slices<'a>(
    first: *const Bytes,
    count: usize,
    what: &str,
) -> Result<Vec<&'a [u8]>, Failed> {
    // SAFETY: the caller's promise.
    let all = unsafe { array(first, count, what) }?;
    // SAFETY: the caller's promise holds for what each leads to as well.
    all.iter().map(|bytes| unsafe { array(bytes.data, bytes.bytes, what) }).collect()
}

/// A client of the caller.
///
/// # Safety
/// `client` is NULL or came from [`kvasir_open`] and was not closed.
unsafe fn open_client<'a>(client: *const Client) -> Result<&'a Client, Failed> {
    // SAFETY: the caller's promise.
    unsafe { client.as_ref() }.ok_or_else(|| invalid("`client` is NULL"))
}

/// Keys of names.
///
/// # Safety
/// As [`array`].
unsafe fn keys(client: &Client, count: usize, names: *const Bytes) -> Result<Vec<Key>, Failed> {
    // SAFETY: the caller's promise.
    let names = unsafe { slices(names, count, "names") }?;
    Ok(names.into_iter().map(|name| client.key(name)).collect())
}

/// # Safety
/// See `kvasir.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_last_error() -> *const c_char {
    LAST_ERROR.with(|last| last.borrow().as_ptr())
}

/// # Safety
/// See `kvasir.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_open(
    options: *const COpenOptions,
    client: *mut *mut Client,
) -> Status {
    guarded(|| {
        // SAFETY: the caller's promise.
        let options = unsafe { options.as_ref() }.ok_or_else(|| invalid("`options` is NULL"))?;
        if client.is_null() {
            return Err(invalid("`client` is NULL"));
        }
        // SAFETY: the caller's promise about the options' strings.
        let [dir, tenant, namespace] = unsafe {
            [
                text(options.attach_dir, "`attach_dir`")?,
                text(options.tenant, "`tenant`")?,
                text(options.name_space, "`name_space`")?,
            ]
        };
        let opened = Client::open(&OpenOptions {
            tenant: tenant.unwrap_or_default().into(),
            namespace: namespace.unwrap_or_default().into(),
            object_bytes_max: options.object_bytes_max,
            polling: Duration::from_micros(options.polling_us),
            ..OpenOptions::new(dir.ok_or_else(|| invalid("`attach_dir` is NULL"))?)
        })?;
        // SAFETY: not NULL; the caller's promise that it can be written.
        unsafe { *client = Box::into_raw(Box::new(opened)) };
        Ok(())
    })
}

/// # Safety
/// See `kvasir.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_close(client: *mut Client) {
    if !client.is_null() {
        // SAFETY: it came from `kvasir_open`, and the caller closes it once.
        let client = unsafe { Box::from_raw(client) };
        guarded(|| {
            drop(client);
            Ok(())
        });
    }
}

/// # Safety
/// See `kvasir.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_object_bytes_max(client: *const Client) -> usize {
    // SAFETY: the caller's promise.
    unsafe { open_client(client) }.map_or(0, Client::object_bytes_max)
}

/// # Safety
/// See `kvasir.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_objects_max(client: *const Client) -> usize {
    // SAFETY: the caller's promise.
    unsafe { open_client(client) }.map_or(0, Client::objects_max)
}

/// # Safety
/// See `kvasir.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_put(
    client: *const Client,
    count: usize,
    names: *const Bytes,
    objects: *const Bytes,
    options: *const CPutOptions,
    outcomes: *mut c_int,
) -> Status {
    guarded(|| {
        // SAFETY: the caller's promises about each pointer.
        let (client, options) = unsafe { (open_client(client)?, options.as_ref()) };
        // SAFETY: as above.
        let (keys, objects) =
            unsafe { (keys(client, count, names)?, slices(objects, count, "objects")?) };
        if outcomes.is_null() && count > 0 {
            return Err(invalid("`outcomes` is NULL"));
        }
        let class = match options.map_or(0, |options| options.object_class) {
            0 => Class::Normal,
            1 => Class::Ephemeral,
            2 => {
                let ttl_ms = options.map_or(0, |options| options.ttl_ms);
                Class::Context { ttl: Duration::from_millis(ttl_ms) }
            }
            other => return Err(invalid(format!("{other} is not an object class"))),
        };
        let put: Vec<(Key, &[u8])> = keys.into_iter().zip(objects).collect();
        let done = client.put(&put, &PutOptions { class, ..PutOptions::default() })?;
        for (position, outcome) in done.into_iter().enumerate() {
            let outcome = match outcome {
                Outcome::Stored => 0,
                Outcome::Exists => 1,
                Outcome::Lost => 2,
                Outcome::NotPersisted(why) => {
                    note(why);
                    3
                }
                Outcome::Refused => 4,
            };
            // SAFETY: there is room for `count`, which is as many as there are outcomes.
            unsafe { outcomes.add(position).write(outcome) };
        }
        Ok(())
    })
}

/// # Safety
/// See `kvasir.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_get(
    client: *const Client,
    count: usize,
    names: *const Bytes,
    verify: c_int,
    objects: *mut CObject,
    batch: *mut *mut Batch,
) -> Status {
    let get = |client: &Client, keys: &[Key]| match verify {
        0 => client.get(keys),
        _ => client.get_verified(keys),
    };
    // SAFETY: the caller's promises.
    unsafe { got(client, count, names, objects, batch, get) }
}

/// # Safety
/// See `kvasir.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_get_from(
    client: *const Client,
    node: *const c_char,
    count: usize,
    names: *const Bytes,
    objects: *mut CObject,
    batch: *mut *mut Batch,
) -> Status {
    // SAFETY: the caller's promise.
    let node = unsafe { text(node, "`node`") };
    // SAFETY: the caller's promises.
    unsafe {
        got(client, count, names, objects, batch, |client, keys| match node {
            Ok(Some(node)) => client.get_from(keys, node),
            Ok(None) => Err(Error::Invalid("`node` is NULL".into())),
            Err(Failed(_, why)) => Err(Error::Invalid(why)),
        })
    }
}

/// Gets objects in this way, and pins them for the caller.
///
/// # Safety
/// As [`kvasir_get`].
unsafe fn got(
    client: *const Client,
    count: usize,
    names: *const Bytes,
    objects: *mut CObject,
    batch: *mut *mut Batch,
    get: impl FnOnce(&Client, &[Key]) -> Result<Vec<Option<Object>>, Error>,
) -> Status {
    guarded(|| {
        // SAFETY: the caller's promises.
        let client = unsafe { open_client(client) }?;
        // SAFETY: as above.
        let keys = unsafe { keys(client, count, names) }?;
        if batch.is_null() || (objects.is_null() && count > 0) {
            return Err(invalid("`objects` or `batch` is NULL"));
        }
        let got = get(client, &keys)?;
        for (position, object) in got.iter().enumerate() {
            let object = match object {
                None => {
                    CObject { data: std::ptr::null(), bytes: 0, offset_bytes: 0, generation: 0 }
                }
                Some(object) => CObject {
                    data: object.as_ptr(),
                    bytes: object.len(),
                    offset_bytes: object.offset() as u64,
                    generation: object.generation(),
                },
            };
            // SAFETY: there is room for `count`, which is as many as were got.
            unsafe { objects.add(position).write(object) };
        }
        // SAFETY: not NULL; the caller's promise that it can be written.
        unsafe { *batch = Box::into_raw(Box::new(Batch { objects: got })) };
        Ok(())
    })
}

/// # Safety
/// See `kvasir.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_release(batch: *mut Batch) {
    if !batch.is_null() {
        // SAFETY: it came from `kvasir_get`, and the caller releases it once.
        let batch = unsafe { Box::from_raw(batch) };
        guarded(|| {
            drop(batch);
            Ok(())
        });
    }
}

/// # Safety
/// See `kvasir.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_is_current(batch: *const Batch, position: usize) -> c_int {
    // SAFETY: the caller's promise.
    let objects = unsafe { batch.as_ref() }.map_or(&[][..], |batch| &batch.objects);
    let object = objects.get(position).and_then(Option::as_ref);
    object.is_some_and(Object::is_current).into()
}

/// # Safety
/// See `kvasir.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_fetch(
    client: *const Client,
    node: *const c_char,
    count: usize,
    names: *const Bytes,
    here: *mut c_int,
) -> Status {
    guarded(|| {
        // SAFETY: the caller's promises.
        let (client, node) = unsafe { (open_client(client)?, text(node, "`node`")?) };
        let node = node.ok_or_else(|| invalid("`node` is NULL"))?;
        // SAFETY: as above.
        let keys = unsafe { keys(client, count, names) }?;
        if here.is_null() && count > 0 {
            return Err(invalid("`present` is NULL"));
        }
        for (position, came) in client.fetch(&keys, node)?.into_iter().enumerate() {
            // SAFETY: there is room for `count`, which is as many as were asked for.
            unsafe { here.add(position).write(came.into()) };
        }
        Ok(())
    })
}

/// # Safety
/// See `kvasir.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_find(
    client: *const Client,
    count: usize,
    names: *const Bytes,
    tiers: *mut c_int,
) -> Status {
    guarded(|| {
        // SAFETY: the caller's promises.
        let client = unsafe { open_client(client) }?;
        // SAFETY: as above.
        let keys = unsafe { keys(client, count, names) }?;
        if tiers.is_null() && count > 0 {
            return Err(invalid("`tiers` is NULL"));
        }
        for (position, tier) in client.find(&keys)?.into_iter().enumerate() {
            let tier = match tier {
                None => 0,
                Some(Tier::Dram) => 1,
                Some(Tier::Ssd) => 2,
            };
            // SAFETY: there is room for `count`, which is as many as were asked for.
            unsafe { tiers.add(position).write(tier) };
        }
        Ok(())
    })
}

/// # Safety
/// See `kvasir.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_remove(
    client: *const Client,
    count: usize,
    names: *const Bytes,
    removed: *mut usize,
) -> Status {
    guarded(|| {
        // SAFETY: the caller's promises.
        let client = unsafe { open_client(client) }?;
        // SAFETY: as above.
        let keys = unsafe { keys(client, count, names) }?;
        let count = client.remove(&keys)?;
        // SAFETY: NULL, or the caller's promise that it can be written.
        if let Some(removed) = unsafe { removed.as_mut() } {
            *removed = count;
        }
        Ok(())
    })
}
