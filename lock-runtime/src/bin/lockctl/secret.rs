//! The parts of an argument that are never printed.

/// `text` without the log-in and the parameters of a URL in `argument`, which it may quote.
pub(crate) fn hidden(text: &str, argument: &str) -> String {
    let Some((_, url)) = argument.split_once("://") else { return text.to_owned() };
    // A password may contain any other character, unless it is encoded.
    let (before, secret) = match url.split_once('?') {
        _ if url.contains('@') => ("://", url),
        Some((_, parameters)) => ("?", parameters),
        None => return text.to_owned(),
    };
    let text = text.replace(&format!("{before}{secret}"), &format!("{before}***"));
    // Of an option that does not exist, clap quotes the part up to the first `=`.
    match secret.split_once('=') {
        Some((name, _)) if argument.starts_with('-') && !name.is_empty() => {
            text.replace(&format!("{before}{name}"), &format!("{before}***"))
        }
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_hidden_up_to_an_equals_sign() {
        let text = "unexpected argument '--redis://u:can' found";
        let shown = "unexpected argument '--redis://***' found";
        assert_eq!(hidden(text, "--redis://u:can=ary@h"), shown);
        assert_eq!(hidden("'redis://h' '://u'", "--url=redis://u:p@h"), "'redis://h' '://u'");
    }

    #[test]
    fn passwords_are_hidden_wherever_a_url_has_them() {
        for (argument, shown) in [
            ("redis://user:p@ss?w@host:6379/0", "redis://***"),
            ("--url=rediss://:canary@host", "--url=rediss://***"),
            ("redis+sentinel://h/x?sentinel_password=canary", "redis+sentinel://h/x?***"),
            ("redis://host:6379", "redis://host:6379"),
            ("order:42@host", "order:42@host"),
        ] {
            let text = format!("unexpected argument '{argument}' found");
            assert_eq!(hidden(&text, argument), format!("unexpected argument '{shown}' found"));
        }
    }
}
