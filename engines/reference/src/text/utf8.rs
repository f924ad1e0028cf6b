//! Bytes to text, a few at a time: the pieces join to what `String::from_utf8_lossy` makes of all
//! the bytes together. At most three bytes are held back, those of a character that may yet become
//! complete.

/// The state between two pieces.
#[derive(Debug, Default)]
pub(crate) struct Utf8Stream {
    /// The beginning of a valid character; at most 3 bytes.
    held: Vec<u8>,
}

impl Utf8Stream {
    /// Appends to `text` what `bytes` settles.
    pub(crate) fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.held.extend_from_slice(bytes);
        let mut at = 0;
        loop {
            match std::str::from_utf8(&self.held[at..]) {
                Ok(rest) => {
                    text.push_str(rest);
                    self.held.clear();
                    return;
                }
                Err(error) => {
                    let valid = at + error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.held[at..valid]));
                    let Some(bad) = error.error_len() else {
                        self.held.drain(..valid);
                        return;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    at = valid + bad;
                }
            }
        }
    }

    /// No more bytes come: an incomplete character is a wrong one.
    pub(crate) fn finish(&mut self, text: &mut String) {
        if !self.held.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            self.held.clear();
        }
    }
}
