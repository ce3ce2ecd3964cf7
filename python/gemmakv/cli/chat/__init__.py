"""`gemmakv chat`: many conversations over one model, on a terminal or a pipe.

    command.py    the command line's options; chooses terminal or pipe
    terminal.py   the loop on a terminal       completion.py  what Tab offers
    pipe.py       the loop on a pipe
    chat.py       the open conversations, what commands and loops work on
    commands.py   the table of commands        arguments.py   what they take
    actions.py    commands that change things  reports.py     that tell things
    settings.py   what /set knows              reply.py       one reply
    book.py       names and ancestry           records.py     a record as JSON
    store.py      conversations on disk        saver.py       writes meanwhile
    restore.py    a live session of a record   view.py        how things look
    table.py      counts, texts, columns       wrap.py        breaks lines

Importing this package imports none of it.
"""
