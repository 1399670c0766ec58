//! The arguments of `#[locked(..)]`.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, format_ident, quote_spanned};
use syn::{
    Error, Expr, ExprLit, Ident, Lit, LitStr, Path, Result, Token,
    ext::IdentExt,
    parse::{Parse, ParseStream},
    spanned::Spanned,
};

use crate::time::{TEN_YEARS, Time, duration, millis, text};

const OPTIONS: &str = "client, kind, wait, lease, owner, busy, guard, crate, and for kind = \"red\": tries, delay, drift";
/// The kinds, and the methods of `LockClient` that create them.
const DOORS: [(&str, &str); 11] = [
    ("mutex", "mutex"),
    ("reentrant", "reentrant_lock"),
    ("fair", "fair_lock"),
    ("fenced", "fenced_lock"),
    ("read", "read_write_lock"),
    ("write", "read_write_lock"),
    ("spin", "spin_lock"),
    ("string", "string_lock"),
    ("signal", "signal_lock"),
    ("non_reentrant", "non_reentrant_lock"),
    ("non_reentrant_fair", "non_reentrant_fair_lock"),
];

#[derive(Default)]
pub(crate) struct Args {
    /// The format string, and its positional arguments.
    name: Option<(LitStr, Vec<Expr>)>,
    client: Option<Expr>,
    kind: Option<LitStr>,
    wait: Option<Time>,
    lease: Option<Time>,
    owner: Option<Expr>,
    pub(crate) busy: Option<Expr>,
    pub(crate) guard: Option<Ident>,
    krate: Option<Path>,
    tries: Option<Expr>,
    delay: Option<(Time, Time)>,
    drift: Option<Expr>,
}

impl Parse for Args {
    fn parse(input: ParseStream) -> Result<Self> {
        let mut args = Self::default();
        let mut seen: Vec<Ident> = Vec::new();
        if input.peek(LitStr) {
            args.name = Some((input.parse()?, Vec::new()));
            comma(input)?;
        }
        while !input.is_empty() {
            let is_option =
                input.peek(Ident::peek_any) && input.peek2(Token![=]) && !input.peek2(Token![==]);
            if is_option {
                let option = input.call(Ident::parse_any)?;
                input.parse::<Token![=]>()?;
                if seen.contains(&option) {
                    return Err(Error::new(
                        option.span(),
                        format!("`{option}` is given twice"),
                    ));
                }
                args.set(&option, input)?;
                seen.push(option);
            } else {
                let value: Expr = input.parse()?;
                let text = match &mut args.name {
                    Some((_, values)) if seen.is_empty() => {
                        values.push(value);
                        comma(input)?;
                        continue;
                    }
                    Some(_) => "format arguments must follow the name directly, before the options",
                    None => "the name must come first: a format string such as \"order:{id}\"",
                };
                return Err(Error::new(value.span(), text));
            }
            comma(input)?;
        }
        args.check(&seen)?;
        Ok(args)
    }
}

fn comma(input: ParseStream) -> Result<()> {
    if !input.is_empty() {
        input.parse::<Token![,]>()?;
    }
    Ok(())
}

impl Args {
    fn set(&mut self, option: &Ident, input: ParseStream) -> Result<()> {
        match option.to_string().as_str() {
            "client" => self.client = Some(input.parse()?),
            "kind" => self.kind = Some(input.parse()?),
            "wait" => self.wait = Some(Time::new(input.parse()?, 0)?),
            "lease" => self.lease = Some(Time::new(input.parse()?, 10)?),
            "owner" => self.owner = Some(input.parse()?),
            "busy" => self.busy = Some(input.parse()?),
            "guard" => self.guard = Some(input.parse()?),
            "crate" => self.krate = Some(input.call(Path::parse_mod_style)?),
            "tries" => {
                self.tries = Some(number(input.parse()?, "at least 1", |tries| tries >= 1.0)?);
            }
            "delay" => self.delay = Some(delay(&input.parse()?)?),
            "drift" => {
                self.drift = Some(number(input.parse()?, "0 to 0.5", |drift| {
                    (0.0..=0.5).contains(&drift)
                })?);
            }
            _ => {
                return Err(Error::new(
                    option.span(),
                    format!("unknown option `{option}`; the options are {OPTIONS}"),
                ));
            }
        }
        Ok(())
    }

    fn check(&self, seen: &[Ident]) -> Result<()> {
        if let Some((format, _)) = &self.name {
            check_captures(format)?;
        }
        if let Some(kind) = &self.kind
            && kind.value() != "red"
            && DOORS.iter().all(|(name, _)| *name != kind.value())
        {
            let kinds: Vec<_> = DOORS.iter().map(|(name, _)| *name).chain(["red"]).collect();
            return Err(Error::new(
                kind.span(),
                format!("unknown kind; the kinds are {}", kinds.join(", ")),
            ));
        }
        if let Some(option) = seen
            .iter()
            .find(|option| ["tries", "delay", "drift"].iter().any(|red| *option == red))
            && !self.is_red()
        {
            return Err(Error::new(
                option.span(),
                format!("`{option}` requires kind = \"red\""),
            ));
        }
        if self.client.is_none() {
            let text = "missing option `client = ..`: an expression of type `LockClient`, such as `client = self.locks`";
            return Err(Error::new(Span::call_site(), text));
        }
        Ok(())
    }

    fn is_red(&self) -> bool {
        self.kind.as_ref().is_some_and(|kind| kind.value() == "red")
    }

    pub(crate) fn has_name(&self) -> bool {
        self.name.is_some()
    }

    /// Returns the path of the runtime crate, by default `nestlock_recipes`.
    pub(crate) fn krate(&self) -> TokenStream {
        let given = self.krate.as_ref().map(ToTokens::to_token_stream);
        given.unwrap_or_else(|| quote_spanned!(Span::mixed_site()=> ::nestlock_recipes))
    }

    /// Returns an expression of type `String`.
    fn name(&self, function: &Ident) -> TokenStream {
        let mixed = Span::mixed_site();
        match &self.name {
            Some((format, values)) if values.is_empty() && !format.value().contains(['{', '}']) => {
                quote_spanned!(mixed=> ::std::string::String::from(#format))
            }
            // the literal must keep its span: the compiler resolves its captures by it
            Some((format, values)) => quote_spanned!(mixed=> ::std::format!(#format #(, #values)*)),
            None => {
                let function = function.unraw().to_string();
                quote_spanned!(mixed=> ::std::string::String::from(
                    ::core::concat!(::core::module_path!(), "::", #function)
                ))
            }
        }
    }

    /// Returns an expression of type `nestlock::Result<Lock>`, which borrows nothing.
    pub(crate) fn lock(&self, function: &Ident) -> TokenStream {
        let (krate, name, mixed) = (self.krate(), self.name(function), Span::mixed_site());
        let client = self.client.as_ref().expect("checked when it was parsed");
        // a reference, so that anything that dereferences to a client works: a field, an `Arc`, an
        // extractor
        let client = quote_spanned!(client.span()=> &(#client));
        if self.is_red() {
            let mut options = quote_spanned!(mixed=> #krate::nestlock::RedLockOptions::new());
            if let Some(tries) = &self.tries {
                options.extend(quote_spanned!(mixed=> .tries(#tries)));
            }
            if let Some((least, most)) = &self.delay {
                let (least, most) = (least.tokens(), most.tokens());
                options.extend(quote_spanned!(mixed=> .retry_delay(#least, #most)));
            }
            if let Some(drift) = &self.drift {
                options.extend(quote_spanned!(mixed=> .drift_factor(#drift)));
            }
            return quote_spanned!(mixed=> #krate::locked::expansion::red(#client, &#name, #options));
        }
        let kind = self.kind.as_ref().map_or("mutex".into(), LitStr::value);
        let (_, door) = DOORS
            .iter()
            .find(|(name, _)| *name == kind)
            .expect("checked when it was parsed");
        let door = format_ident!("{door}", span = mixed);
        let lock = quote_spanned!(mixed=> #krate::nestlock::LockClient::#door(#client, #name));
        match kind.as_str() {
            "read" => quote_spanned!(mixed=> #lock.map(|lock| lock.read_lock())),
            "write" => quote_spanned!(mixed=> #lock.map(|lock| lock.write_lock())),
            _ => lock,
        }
    }

    /// Returns an expression of type `Option<Duration>`. `None` waits without limit.
    pub(crate) fn wait(&self) -> TokenStream {
        let mixed = Span::mixed_site();
        let wait = match (&self.wait, &self.tries) {
            (Some(wait), _) => wait.tokens(),
            // without a limit, busy rounds would not count as tries
            (None, Some(_)) => duration(TEN_YEARS),
            (None, None) => return quote_spanned!(mixed=> ::core::option::Option::None),
        };
        // not inside `Some(..)`: there, the compiler's message about a wrong type depends on
        // whether the source of std is installed
        quote_spanned!(mixed=> {
            let wait: ::core::time::Duration = #wait;
            ::core::option::Option::Some(wait)
        })
    }

    /// Returns an expression of type `AcquireOptions`.
    pub(crate) fn options(&self) -> TokenStream {
        let (krate, mixed) = (self.krate(), Span::mixed_site());
        let mut options = quote_spanned!(mixed=> #krate::nestlock::AcquireOptions::new());
        if let Some(lease) = &self.lease {
            let lease = lease.tokens();
            options.extend(quote_spanned!(mixed=> .lease(#lease)));
        }
        if let Some(owner) = &self.owner {
            options.extend(quote_spanned!(mixed=> .owner(#owner)));
        }
        options
    }
}

/// Checks a number. The range is checked only if it is a literal.
fn number(value: Expr, range: &str, fits: impl Fn(f64) -> bool) -> Result<Expr> {
    let number: f64 = match &value {
        Expr::Lit(ExprLit {
            lit: Lit::Int(number),
            ..
        }) => number.base10_parse()?,
        Expr::Lit(ExprLit {
            lit: Lit::Float(number),
            ..
        }) => number.base10_parse()?,
        Expr::Lit(_) => {
            return Err(Error::new(
                value.span(),
                format!("not a number: expected {range}"),
            ));
        }
        _ => return Ok(value),
    };
    if fits(number) {
        Ok(value)
    } else {
        Err(Error::new(
            value.span(),
            format!("{number} is out of range: expected {range}"),
        ))
    }
}

/// Parses a range of delays: `"100ms..200ms"`, or one value. Half of the single value is the minimum.
fn delay(value: &Expr) -> Result<(Time, Time)> {
    let Some(text) = text(value)? else {
        return Err(Error::new(
            value.span(),
            "expected a string such as \"200ms\" or \"100ms..200ms\"",
        ));
    };
    let Some((least, most)) = text.split_once("..") else {
        let most = millis(&text, value.span())?;
        return Ok((Time::Millis(most / 2), Time::Millis(most)));
    };
    let (least, most) = (millis(least, value.span())?, millis(most, value.span())?);
    if least > most {
        return Err(Error::new(
            value.span(),
            format!("{text:?}: the first delay must not be the longer one"),
        ));
    }
    Ok((Time::Millis(least), Time::Millis(most)))
}

/// Checks that the format string captures only variables: for anything else in its braces, the
/// message of rustc would not fit the attribute.
fn check_captures(format: &LitStr) -> Result<()> {
    let text = format.value().replace("{{", "");
    for inside in text
        .split('{')
        .skip(1)
        .filter_map(|rest| rest.split_once('}'))
    {
        let captured = inside.0.split(':').next().unwrap_or_default().trim();
        if captured.contains(|letter: char| !letter.is_alphanumeric() && letter != '_') {
            let by_position = format.value().replacen(&format!("{{{captured}"), "{", 1);
            let text = format!(
                "a format string captures only variables, not `{captured}`; pass it as an argument: {by_position:?}, {captured}"
            );
            return Err(Error::new(format.span(), text));
        }
    }
    Ok(())
}
