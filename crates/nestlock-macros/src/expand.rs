//! The expansion of `#[locked]`.

use proc_macro2::{Span, TokenStream, TokenTree};
use quote::{ToTokens, quote_spanned};
use syn::{
    AttrStyle, Error, Expr, ExprAsync, ExprCall, GenericArgument, ItemFn, PathArguments, Result,
    ReturnType, Stmt, Type, TypeParamBound, parse2, spanned::Spanned,
};

use crate::args::Args;

const NOT_ASYNC: &str = "#[locked] needs an `async fn`. If another attribute (#[tokio::main], #[tokio::test]) has already \
                         rewritten this one, put #[locked] above that attribute";

pub(crate) fn expand(args: TokenStream, item: &TokenStream) -> TokenStream {
    locked(args, item).unwrap_or_else(|error| {
        // keep the function, so that its callers do not fail to compile, too
        let mut tokens = error.into_compile_error();
        tokens.extend(item.clone());
        tokens
    })
}

fn locked(args: TokenStream, item: &TokenStream) -> Result<TokenStream> {
    let args: Args = parse2(args)?;
    let function: ItemFn = parse2(item.clone()).map_err(|error| {
        let text = format!("#[locked] needs an `async fn` with a body ({error})");
        Error::new_spanned(item, text)
    })?;
    refuse(&args, &function)?;
    let ItemFn {
        attrs,
        vis,
        sig,
        block,
        ..
    } = &function;
    let mixed = Span::mixed_site();
    let body = if sig.asyncness.is_some() {
        let ReturnType::Type(_, output) = &sig.output else {
            let text =
                "a lock may be busy or lost: return a `Result<_, E>` where `E: From<LockedError>`";
            return Err(Error::new_spanned(&sig.ident, text));
        };
        under_lock(&args, &function, output, &block.stmts)
    } else {
        let boxed =
            Boxed::of(&function).ok_or_else(|| Error::new_spanned(sig.fn_token, NOT_ASYNC))?;
        let (pin, inner) = (
            boxed.pin,
            under_lock(&args, &function, boxed.output, &boxed.body.block.stmts),
        );
        let typed = typed(&args, boxed.output);
        quote_spanned!(mixed=> #pin(async move { #typed #inner }))
    };
    // an inner attribute must stay at the top of the body
    let (inner, outer): (Vec<_>, Vec<_>) = attrs
        .iter()
        .partition(|attr| matches!(attr.style, AttrStyle::Inner(_)));
    Ok(quote_spanned!(mixed=> #(#outer)* #vis #sig { #(#inner)* #body }))
}

/// Rejects functions that cannot be locked, or for which the compiler's message would not show the
/// cause.
fn refuse(args: &Args, function: &ItemFn) -> Result<()> {
    let sig = &function.sig;
    if let Some(token) = sig.constness {
        return Err(Error::new_spanned(
            token,
            "#[locked] cannot lock a `const fn`",
        ));
    }
    if let Some(abi) = &sig.abi {
        return Err(Error::new_spanned(
            abi,
            "#[locked] cannot lock an `extern fn`",
        ));
    }
    if let (ReturnType::Type(_, output), Some(_)) = (&sig.output, sig.asyncness)
        && let Some(span) = find_impl(output.to_token_stream())
    {
        let text = "#[locked] must name the return type, and `impl Trait` has no name: return a concrete type or a `Box<dyn Trait>`";
        return Err(Error::new(span, text));
    }
    if !args.has_name() && sig.receiver().is_some() {
        // methods of two types in one module would share a name
        let text = "the lock of a method needs a name: #[locked(\"order:{id}\", ..)]; only functions have a default name";
        return Err(Error::new(Span::call_site(), text));
    }
    Ok(())
}

fn find_impl(tokens: TokenStream) -> Option<Span> {
    tokens.into_iter().find_map(|token| match token {
        TokenTree::Ident(ident) => (ident == "impl").then(|| ident.span()),
        TokenTree::Group(group) => find_impl(group.stream()),
        _ => None,
    })
}

/// Returns the body of the function: acquire, run, release.
fn under_lock(args: &Args, function: &ItemFn, output: &Type, body: &[Stmt]) -> TokenStream {
    let (krate, mixed) = (args.krate(), Span::mixed_site());
    let (lock, wait, options) = (args.lock(&function.sig.ident), args.wait(), args.options());
    let busy = args.busy.as_ref().map(|busy| {
        quote_spanned!(mixed=> ::core::result::Result::Err(#krate::locked::LockedError::Busy { .. }) => {
            // the expression may itself return
            #[allow(unreachable_code, clippy::diverging_sub_expression)]
            return ::core::result::Result::Err(#busy);
        })
    });
    // errors about the return type are reported at that type
    let returned = mixed.located_at(output.span());
    let failed =
        quote_spanned!(returned=> ::core::result::Result::Err(::core::convert::From::from(error)));
    let release =
        quote_spanned!(returned=> #krate::locked::expansion::release(guard, outcome).await);
    let named = args
        .guard
        .as_ref()
        .map(|name| quote_spanned!(mixed=> let #name = held;));
    let typed = typed(args, output);
    quote_spanned! {mixed=>
        // the name is built before the body moves its parts
        let lock = #lock;
        let guard = match #krate::locked::expansion::acquire(lock, #wait, #options).await {
            ::core::result::Result::Ok(guard) => guard,
            #busy
            ::core::result::Result::Err(error) => return #failed,
        };
        let held = &guard;
        let outcome = held.run_until_lost(async move { #typed #named #(#body)* }).await;
        #release
    }
}

/// Returns a `return` that is never reached: it fixes the output type of the surrounding async
/// block, as the signature does for a function.
fn typed(args: &Args, output: &Type) -> TokenStream {
    let krate = args.krate();
    quote_spanned!(Span::mixed_site()=> if false { return #krate::locked::expansion::never::<#output>(); })
}

/// The output of `#[async_trait]` for an `async fn`: `Box::pin(async move { .. })`, with a return
/// type that names its output.
struct Boxed<'a> {
    pin: &'a Expr,
    body: &'a ExprAsync,
    output: &'a Type,
}

impl<'a> Boxed<'a> {
    fn of(function: &'a ItemFn) -> Option<Self> {
        let [
            Stmt::Expr(
                Expr::Call(ExprCall {
                    func: pin, args, ..
                }),
                None,
            ),
        ] = &function.block.stmts[..]
        else {
            return None;
        };
        let Expr::Path(path) = &**pin else {
            return None;
        };
        let path: Vec<_> = path
            .path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string())
            .collect();
        let (Some(Expr::Async(body)), [.., "Box", "pin"]) = (
            args.first(),
            &path.iter().map(String::as_str).collect::<Vec<_>>()[..],
        ) else {
            return None;
        };
        let ReturnType::Type(_, returned) = &function.sig.output else {
            return None;
        };
        let boxed = generics(returned, "Pin")?.find_map(argument)?;
        let Type::TraitObject(future) = generics(boxed, "Box")?.find_map(argument)? else {
            return None;
        };
        let output = future.bounds.iter().find_map(|bound| {
            let TypeParamBound::Trait(bound) = bound else {
                return None;
            };
            let PathArguments::AngleBracketed(arguments) = &bound.path.segments.last()?.arguments
            else {
                return None;
            };
            arguments.args.iter().find_map(|argument| match argument {
                GenericArgument::AssocType(output) if output.ident == "Output" => Some(&output.ty),
                _ => None,
            })
        })?;
        Some(Self { pin, body, output })
    }
}

/// Returns the generic arguments of a type whose path ends in `name`.
fn generics<'a>(of: &'a Type, name: &str) -> Option<impl Iterator<Item = &'a GenericArgument>> {
    let Type::Path(path) = of else { return None };
    let last = path
        .path
        .segments
        .last()
        .filter(|segment| segment.ident == name)?;
    let PathArguments::AngleBracketed(arguments) = &last.arguments else {
        return None;
    };
    Some(arguments.args.iter())
}

fn argument(argument: &GenericArgument) -> Option<&Type> {
    match argument {
        GenericArgument::Type(of) => Some(of),
        _ => None,
    }
}
