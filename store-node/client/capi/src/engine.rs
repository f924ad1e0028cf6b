//! The attach of an engine. What is said travels encoded as in `proto/kvasir/v1/attach.proto`.

use std::ffi::{c_char, c_int};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_attach::{AttachError, EngineAttachment, Link, Receiver, Sender};
use kvasir_proto::v1;
use prost::Message;

use crate::{Bytes, Failed, Status, array, guarded, invalid, text};

/// `kvasir_engine`.
#[derive(Debug)]
pub struct Engine {
    link: std::sync::Arc<Link>,
    sender: Mutex<Sender>,
    receiver: Mutex<Incoming>,
}

/// The consuming end, and the message that was taken last.
#[derive(Debug)]
struct Incoming {
    receiver: Receiver,
    message: Vec<u8>,
}

/// `kvasir_engine_load`.
#[repr(C)]
#[derive(Debug)]
pub struct CLoad {
    running_requests: u32,
    waiting_requests: u32,
    waiting_prompt_tokens: u64,
    computed_prompt_tokens: u64,
}

impl From<AttachError> for Failed {
    fn from(error: AttachError) -> Self {
        let status = match error {
            AttachError::Unreachable { .. } => Status::Unreachable,
            AttachError::Refused(_) => Status::Refused,
            AttachError::Lost => Status::Lost,
            AttachError::Full => Status::NoCapacity,
            AttachError::TooLong { .. } => Status::Invalid,
            AttachError::Protocol(_) => Status::Protocol,
        };
        Failed(status, error.to_string())
    }
}

fn attach(dir: &Path, request: v1::AttachRequest) -> Result<EngineAttachment, Failed> {
    // On a thread of its own: the caller's may belong to an async runtime.
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|error| invalid(error.to_string()))?;
            Ok(runtime.block_on(EngineAttachment::request(dir.into(), request))?)
        });
        let died = || Failed(Status::Protocol, "a bug: the attaching thread panicked".into());
        asked.join().unwrap_or_else(|_| Err(died()))
    })
}

fn locked<T>(end: &Mutex<T>) -> MutexGuard<'_, T> {
    end.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An engine of the caller.
///
/// # Safety
/// `engine` is NULL or came from [`kvasir_engine_attach`] and was not detached.
unsafe fn attached<'a>(engine: *const Engine) -> Result<&'a Engine, Failed> {
    // SAFETY: the caller's promise.
    unsafe { engine.as_ref() }.ok_or_else(|| invalid("`engine` is NULL"))
}

/// # Safety
/// See `kvasir_engine.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_engine_attach(
    attach_dir: *const c_char,
    request: *const u8,
    request_bytes: usize,
    engine: *mut *mut Engine,
) -> Status {
    guarded(|| {
        // SAFETY: the caller's promises about both.
        let (dir, request) = unsafe {
            (text(attach_dir, "`attach_dir`")?, array(request, request_bytes, "request")?)
        };
        let dir = dir.ok_or_else(|| invalid("`attach_dir` is NULL"))?;
        let request = v1::AttachRequest::decode(request)
            .map_err(|error| invalid(format!("`request` is not an AttachRequest: {error}")))?;
        if engine.is_null() {
            return Err(invalid("`engine` is NULL"));
        }
        let (sender, receiver) = attach(Path::new(dir), request)?.split();
        let made = Engine {
            link: std::sync::Arc::clone(sender.link()),
            sender: Mutex::new(sender),
            receiver: Mutex::new(Incoming { receiver, message: Vec::new() }),
        };
        // SAFETY: not NULL; the caller's promise that it can be written.
        unsafe { *engine = Box::into_raw(Box::new(made)) };
        Ok(())
    })
}

/// # Safety
/// See `kvasir_engine.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_engine_detach(engine: *mut Engine) {
    if !engine.is_null() {
        // SAFETY: it came from `kvasir_engine_attach`, and the caller detaches it once.
        let engine = unsafe { Box::from_raw(engine) };
        guarded(|| {
            drop(engine);
            Ok(())
        });
    }
}

/// # Safety
/// See `kvasir_engine.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_engine_slots(engine: *const Engine, bytes: *mut usize) -> *mut u8 {
    // SAFETY: the caller's promise.
    let Ok(engine) = (unsafe { attached(engine) }) else { return std::ptr::null_mut() };
    let slots = engine.link.slot_memory();
    // SAFETY: NULL, or the caller's promise that it can be written.
    if let Some(bytes) = unsafe { bytes.as_mut() } {
        *bytes = slots.len();
    }
    slots.as_ptr()
}

/// # Safety
/// See `kvasir_engine.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_engine_slots_fd(engine: *const Engine) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { attached(engine) }.map_or(-1, |engine| engine.link.slot_memory().fd().as_raw_fd())
}

/// # Safety
/// See `kvasir_engine.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_engine_pool(engine: *const Engine, bytes: *mut usize) -> *mut u8 {
    // SAFETY: the caller's promise.
    let pool = unsafe { attached(engine) }.ok().and_then(|engine| engine.link.pool_memory());
    // SAFETY: NULL, or the caller's promise that it can be written.
    if let Some(bytes) = unsafe { bytes.as_mut() } {
        *bytes = pool.map_or(0, |pool| pool.len());
    }
    pool.map_or(std::ptr::null_mut(), |pool| pool.as_ptr())
}

/// # Safety
/// See `kvasir_engine.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_engine_pool_fd(engine: *const Engine) -> c_int {
    // SAFETY: the caller's promise.
    let pool = unsafe { attached(engine) }.ok().and_then(|engine| engine.link.pool_memory());
    pool.map_or(-1, |pool| pool.fd().as_raw_fd())
}

/// # Safety
/// See `kvasir_engine.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_engine_slots_total(engine: *const Engine) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { attached(engine) }.map_or(0, |engine| engine.link.slots_total())
}

/// # Safety
/// See `kvasir_engine.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_engine_is_connected(engine: *const Engine) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { attached(engine) }.is_ok_and(|engine| engine.link.is_connected()).into()
}

/// # Safety
/// See `kvasir_engine.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_engine_send(
    engine: *const Engine,
    message: *const u8,
    message_bytes: usize,
) -> Status {
    guarded(|| {
        // SAFETY: the caller's promises about both.
        let (engine, message) =
            unsafe { (attached(engine)?, array(message, message_bytes, "message")?) };
        let decoded = v1::EngineToNode::decode(message)
            .map_err(|error| invalid(format!("`message` is not an EngineToNode: {error}")))?;
        let empty = || invalid("`message` is an EngineToNode without a message of this version");
        locked(&engine.sender).send(decoded.message.ok_or_else(empty)?)?;
        Ok(())
    })
}

/// # Safety
/// See `kvasir_engine.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_engine_receive(
    engine: *const Engine,
    timeout_us: u64,
    message: *mut Bytes,
) -> Status {
    guarded(|| {
        // SAFETY: the caller's promises about both.
        let (engine, said) = unsafe { (attached(engine)?, message.as_mut()) };
        let said = said.ok_or_else(|| invalid("`message` is NULL"))?;
        *said = Bytes { data: std::ptr::null(), bytes: 0 };
        let mut incoming = locked(&engine.receiver);
        let Incoming { receiver, message } = &mut *incoming;
        message.clear();
        if let Some(record) = receiver.try_recv_encoded()? {
            message.extend_from_slice(record);
        } else if timeout_us > 0 {
            receiver.wait(Duration::from_micros(timeout_us))?;
            message.extend_from_slice(receiver.try_recv_encoded()?.unwrap_or_default());
        }
        if !message.is_empty() {
            *said = Bytes { data: message.as_ptr(), bytes: message.len() };
        }
        Ok(())
    })
}

/// # Safety
/// See `kvasir_engine.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_engine_wake(engine: *const Engine) {
    // SAFETY: the caller's promise.
    if let Ok(engine) = unsafe { attached(engine) } {
        engine.link.wake();
    }
}

/// # Safety
/// See `kvasir_engine.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_engine_progress(
    engine: *const Engine,
    step: u32,
    layers_done: u16,
) {
    // SAFETY: the caller's promise.
    if let Ok(engine) = unsafe { attached(engine) } {
        locked(&engine.sender).progress(step, layers_done);
    }
}

/// # Safety
/// See `kvasir_engine.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_engine_publish_load(engine: *const Engine, load: *const CLoad) {
    // SAFETY: the caller's promises about both.
    if let (Ok(engine), Some(load)) = unsafe { (attached(engine), load.as_ref()) } {
        engine.link.publish_load(&v1::InstanceLoad {
            running_requests: load.running_requests,
            waiting_requests: load.waiting_requests,
            waiting_prompt_tokens: load.waiting_prompt_tokens,
            computed_prompt_tokens: load.computed_prompt_tokens,
        });
    }
}
