//! MLA partial attention over pages, and the merge of partials
