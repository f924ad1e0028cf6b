//! Reads the modules that a Rust file declares and the items that it re-exports. It expands no macros.

use syn::ext::IdentExt;
use syn::{Ident, Item, ItemUse, UseTree, Visibility};

/// A module or a re-export that is visible outside the module it stands in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declaration {
    /// The inline modules around it.
    pub scope: Vec<String>,
    /// It is plain `pub`, without `(crate)` or the like.
    pub is_public: bool,
    pub kind: DeclarationKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeclarationKind {
    /// `pub mod name`.
    Module(String),
    /// One leaf of a `pub use`. A glob ends in `*`, and a path that begins with `::` in an empty segment.
    Reexport(Vec<String>),
}

/// Whether an item is visible outside its module, and whether it is plain `pub`.
fn visibility(of: &Visibility) -> (bool, bool) {
    match of {
        Visibility::Public(_) => (true, true),
        Visibility::Restricted(to) => (!to.path.is_ident("self"), false),
        Visibility::Inherited => (false, false),
    }
}

fn name(ident: &Ident) -> String {
    ident.unraw().to_string()
}

/// The leaves of a tree of `use`, each with the segments before it. A leaf `self` is the path before it.
fn leaves(tree: &UseTree, before: &[String], found: &mut Vec<Vec<String>>) {
    let with = |last: String| [before, &[last]].concat();
    match tree {
        UseTree::Path(path) => leaves(&path.tree, &with(name(&path.ident)), found),
        UseTree::Group(group) => group.items.iter().for_each(|it| leaves(it, before, found)),
        UseTree::Glob(_) => found.push(with("*".to_owned())),
        UseTree::Name(leaf) if leaf.ident == "self" => found.push(before.to_vec()),
        UseTree::Rename(leaf) if leaf.ident == "self" => found.push(before.to_vec()),
        UseTree::Name(leaf) => found.push(with(name(&leaf.ident))),
        UseTree::Rename(leaf) => found.push(with(name(&leaf.ident))),
    }
}

fn reexports(item: &ItemUse) -> Vec<Vec<String>> {
    let root = item.leading_colon.as_ref().map(|_| String::new());
    let mut found = Vec::new();
    leaves(&item.tree, root.as_slice(), &mut found);
    found
}

fn read(items: &[Item], scope: &[String], found: &mut Vec<Declaration>) {
    let mut declare = |visibility_of: &Visibility, kind: DeclarationKind| {
        let (is_visible, is_public) = visibility(visibility_of);
        if is_visible {
            found.push(Declaration { scope: scope.to_vec(), is_public, kind });
        }
    };
    let mut inner = Vec::new();
    for item in items {
        match item {
            Item::Mod(module) => {
                let name = name(&module.ident);
                declare(&module.vis, DeclarationKind::Module(name.clone()));
                inner.extend(module.content.as_ref().map(|(_, items)| (name, items)));
            }
            Item::Use(item) => {
                for path in reexports(item) {
                    declare(&item.vis, DeclarationKind::Reexport(path));
                }
            }
            _ => {}
        }
    }
    for (name, items) in inner {
        read(items, &[scope, &[name]].concat(), found);
    }
}

/// All modules and re-exports of a file that are visible outside the module they stand in.
///
/// # Errors
/// If the text is not a Rust file.
pub fn declarations(text: &str) -> syn::Result<Vec<Declaration>> {
    let mut found = Vec::new();
    read(&syn::parse_file(text)?.items, &[], &mut found);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_modules_and_each_leaf_of_a_reexport_are_read() {
        let text = r#"
            #[cfg(test)] pub mod a;
            pub(crate) mod b { pub mod c; pub use c::D; }
            pub mod r#move; mod private; pub(self) mod own;
            pub use self::{a::{self, B as C, d::*}, r#move::E};
            pub(super) use ::outside::F; use quiet::G;
        "#;
        let line = |it: Declaration| {
            let visibility = if it.is_public { "pub" } else { "restricted" };
            let scope: String = it.scope.iter().map(|name| format!("{name}::")).collect();
            match it.kind {
                DeclarationKind::Module(name) => format!("{visibility} mod {scope}{name}"),
                DeclarationKind::Reexport(path) => {
                    format!("{visibility} use {scope}[{}]", path.join("::"))
                }
            }
        };
        let expected = [
            "pub mod a",
            "restricted mod b",
            "pub mod move",
            "pub use [self::a]",
            "pub use [self::a::B]",
            "pub use [self::a::d::*]",
            "pub use [self::move::E]",
            "restricted use [::outside::F]",
            "pub mod b::c",
            "pub use b::[c::D]",
        ];
        let found = declarations(text).expect("it is Rust");
        assert_eq!(found.into_iter().map(line).collect::<Vec<_>>(), expected);
    }
}
