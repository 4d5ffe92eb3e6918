use proc_macro2::TokenStream;

/// The formatted expansion.
fn expanded(args: &str, item: &str) -> String {
    let tokens: TokenStream = crate::attribute(args.parse().unwrap(), &item.parse().unwrap());
    prettyplease::unparse(&syn::parse2(tokens).unwrap())
}

#[test]
fn a_method_with_an_erased_return_type() {
    let args = r#"key = "order:<order.id>", ttl = "5s""#;
    let item = "pub async fn pay(&self, order: Order) -> Result<impl Iterator<Item = Receipt>, Error> { self.charge(order).await }";
    let expected = r#"pub async fn pay(&self, order: Order) -> Result<impl Iterator<Item = Receipt>, Error> {
    let __error = match ::lock_runtime::__private::enter({
            let __site = {
                static __SITE: ::lock_runtime::__private::Site = ::lock_runtime::__private::Site::new(
                    ::lock_runtime::__private::Location {
                        module: ::core::module_path!(),
                        function: "pay",
                        file: ::core::file!(),
                        line: ::core::line!(),
                    },
                    "order:<order.id>",
                    ::lock_runtime::__private::LockOptions::new()
                        .ttl(::lock_runtime::__private::Duration::from_millis(5000u64)),
                );
                ::lock_runtime::__private::submit! {
                    ::lock_runtime::__private::RegisteredSite(& __SITE)
                }
                &__SITE
            };
            let __call = ::lock_runtime::__private::Call::template(
                __site,
                "order:",
                &[("order.id", &&order.id, "")],
            );
            __call
        })
        .run(async move {
            if let ::core::option::Option::Some(__anchor) = ::core::option::Option::None::<
                Result<_, Error>,
            > {
                return __anchor;
            }
            let _ = &order;
            { self.charge(order).await }
        })
        .await
    {
        ::core::result::Result::Ok(__output) => return __output,
        ::core::result::Result::Err(__error) => __error,
    };
    ::lock_runtime::__private::FromLockError::from_lock_error(__error)
}
"#;
    assert_eq!(expanded(args, item), expected);
}

#[test]
fn expressions_go_on_the_call() {
    let args = r#"keys = ["a:<from>:", "b"], when = from > 1, wait = wait, on_conflict = instead, on_error = |_| 0, crate = my::lock"#;
    let item = "async fn transfer(from: u64, wait: Duration) -> u64 { from }";
    let expected = r#"async fn transfer(from: u64, wait: Duration) -> u64 {
    let __error = match my::lock::__private::Entering::run(
            match my::lock::__private::enter({
                    let __site = {
                        static __SITE: my::lock::__private::Site = my::lock::__private::Site::new(
                            my::lock::__private::Location {
                                module: ::core::module_path!(),
                                function: "transfer",
                                file: ::core::file!(),
                                line: ::core::line!(),
                            },
                            "a:<from>:, b",
                            my::lock::__private::LockOptions::new(),
                        );
                        my::lock::__private::submit! {
                            my::lock::__private::RegisteredSite(& __SITE)
                        }
                        &__SITE
                    };
                    let __when: bool = from > 1;
                    let __call = if __when {
                        let __call = my::lock::__private::Call::all(
                            __site,
                            [
                                {
                                    let __key = my::lock::__private::template(
                                        __site,
                                        "a:",
                                        &[("from", &from, ":")],
                                    );
                                    __key
                                },
                                my::lock::__private::literal("b"),
                            ],
                        );
                        let __call = __call.wait(wait);
                        __call
                    } else {
                        my::lock::__private::Call::unlocked(__site)
                    };
                    __call
                })
                .await
            {
                ::core::result::Result::Ok(__entry) => {
                    my::lock::__private::Entering::entered(__entry)
                }
                ::core::result::Result::Err(__error) => {
                    my::lock::__private::Entering::refused({
                        if my::lock::__private::LockError::is_conflict(&__error) {
                            return instead(from, wait).await;
                        }
                        __error
                    })
                }
            },
            async move {
                if let ::core::option::Option::Some(__anchor) = ::core::option::Option::None::<
                    u64,
                > {
                    return __anchor;
                }
                { from }
            },
        )
        .await
    {
        ::core::result::Result::Ok(__output) => return __output,
        ::core::result::Result::Err(__error) => __error,
    };
    my::lock::__private::on_error(|_| 0, __error)
}
"#;
    assert_eq!(expanded(args, item), expected);
}

#[test]
fn a_boxed_future_is_locked_inside() {
    let args = r#"key = "all", guard = lock, on_conflict = "skip""#;
    let item = "fn load<'a>(&'a self) -> Pin<Box<dyn Future<Output = Result<(), E>> + Send + 'a>> { Box::pin(async move { let __self = self; Ok(()) }) }";
    let expected = r#"fn load<'a>(&'a self) -> Pin<Box<dyn Future<Output = Result<(), E>> + Send + 'a>> {
    Box::pin(async move {
        let __error = match ::lock_runtime::__private::enter({
                let __site = {
                    static __SITE: ::lock_runtime::__private::Site = ::lock_runtime::__private::Site::new(
                        ::lock_runtime::__private::Location {
                            module: ::core::module_path!(),
                            function: "load",
                            file: ::core::file!(),
                            line: ::core::line!(),
                        },
                        "all",
                        ::lock_runtime::__private::LockOptions::new().fencing(true),
                    );
                    ::lock_runtime::__private::submit! {
                        ::lock_runtime::__private::RegisteredSite(& __SITE)
                    }
                    &__SITE
                };
                let __call = ::lock_runtime::__private::Call::new(
                    __site,
                    ::lock_runtime::__private::literal("all"),
                );
                __call
            })
            .await
        {
            ::core::result::Result::Ok(lock) => {
                let lock = ::lock_runtime::__private::Entry::with_guard(lock);
                match ::lock_runtime::__private::Entry::run(
                        lock.0,
                        async move {
                            if let ::core::option::Option::Some(__anchor) = ::core::option::Option::None::<
                                Result<(), E>,
                            > {
                                return __anchor;
                            }
                            let lock = lock.1;
                            let lock: &::lock_runtime::__private::LockGuard = &lock;
                            {
                                let __self = self;
                                Ok(())
                            }
                        },
                    )
                    .await
                {
                    ::core::result::Result::Ok(__output) => return __output,
                    ::core::result::Result::Err(__error) => __error,
                }
            }
            ::core::result::Result::Err(__error) => {
                if ::lock_runtime::__private::LockError::is_conflict(&__error) {
                    return ::lock_runtime::__private::Skipped::skipped();
                }
                __error
            }
        };
        ::lock_runtime::__private::FromLockError::from_lock_error(__error)
    })
}
"#;
    assert_eq!(expanded(args, item), expected);
}

/// Methods may return guards of one mutex.
#[test]
fn values_of_methods_do_not_live_at_the_same_time() {
    let item = "async fn load(a: Job, b: Job) {}";
    let one = expanded(r#"key = "<a.id()>:<b.id>""#, item);
    assert!(one.contains(r#"Call::template("#), "{one}");
    let two = expanded(r#"key = "<a.id()>:<b.id()>", wait = a.wait()"#, item);
    let expected = r#"            let __call = ::lock_runtime::__private::Call::new(
                __site,
                {
                    let mut __key = ::lock_runtime::__private::KeyWriter::new(
                        __site,
                        "",
                        2,
                    );
                    ::lock_runtime::__private::KeyWriter::value(
                        &mut __key,
                        "a.id()",
                        &a.id(),
                        ":",
                    );
                    ::lock_runtime::__private::KeyWriter::value(
                        &mut __key,
                        "b.id()",
                        &b.id(),
                        "",
                    );
                    ::lock_runtime::__private::KeyWriter::finish(__key)
                },
            );
            let __call = __call.wait(a.wait());
            __call
"#;
    assert!(two.contains(expected), "{two}");
}

/// A method may borrow its parameter mutably.
#[test]
fn a_method_is_alone_with_its_parameter() {
    let item = "async fn load(a: &mut Job, b: Job) {}";
    let erased = |key: &str| expanded(&format!("key = {key:?}"), item).contains("Call::template(");
    for key in ["<a.next()>", "<a.next()>:<b.id>", "<a.id>:<b.id>"] {
        assert!(erased(key), "{key}");
    }
    for key in ["<a.id>:<a.next()>", "<a.next()>:<a>", "<a.next()>:<b[a].id>"] {
        assert!(!erased(key), "{key}");
    }
}

/// So that it drops before the release, even if the body uses one field of it.
#[test]
fn a_value_is_captured_as_a_whole() {
    let is_captured = |args: &str, item: &str| {
        expanded(&format!(r#"key = "a", {args}"#), item).contains("let _ = &tx;")
    };
    assert!(is_captured("", "async fn load(tx: Tx) { tx.len() }"));
    assert!(is_captured(
        "",
        "fn load(State(tx): State<Tx>) -> impl Future { async move { tx.n } }"
    ));
    assert!(!is_captured("", "async fn load(tx: &Tx) { tx.len() }"));
    assert!(!is_captured("", "async fn load(tx: Tx) {}"));
    assert!(is_captured("", "async fn load(#[allow(unused)] tx: Tx) { tx.len() }"));
    assert!(!is_captured("", "async fn load(#[cfg_attr(x, cfg(y))] tx: Tx) { tx.len() }"));
    let conditional = "async fn load(#[cfg(x)] tx: Tx) { tx.len() }";
    assert!(expanded(r#"key = "a""#, conditional).contains("#[cfg(x)]\n            let _ = &tx;"));
    assert!(!is_captured("on_error = |e| tx.error(e)", "async fn load(tx: Tx) { tx.len() }"));
}

#[test]
fn a_mistake_leaves_the_item() {
    let args = r#"key = "<idd>""#;
    let item = "async fn load(id: u64) {}";
    let expected = r#"::core::compile_error! {
    "no parameter is named `idd`\n\n  \"<idd>\"\n    ^^^\nhelp: did you mean `id`?"
}
#[allow(unused_variables)]
async fn load(id: u64) {}
"#;
    assert_eq!(expanded(args, item), expected);
}
