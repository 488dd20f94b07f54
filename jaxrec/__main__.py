"""`python -m jaxrec train ...` is `jaxrec-train ...`."""

if __name__ == "__main__":
    from jaxrec_commands import main

    main()
