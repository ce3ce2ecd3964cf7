"""`gemmakv chat`: many conversations over one model, on a terminal or a pipe.

    command.py    the command line's options; chooses terminal or pipe
    terminal.py   the loop on a terminal       completion.py  what Tab offers
    pipe.py       the loop on a pipe           first_screen.py  what to try
    chat.py       the open conversations, what commands and loops work on
    commands.py   the table of commands        arguments.py   what they take
    actions.py    commands that change things  reports.py     that tell things
    settings.py   what /set knows              reply.py       one reply
    book.py       names and ancestry           view.py        how things look
    keyboard.py   keys between prompts         paste.py      pastes as keys
    history.py    what was typed before        emoji.py      in parts
    table.py      counts, texts, columns       wrap.py        breaks lines

Where sessions are kept is `gemmakv.conversations`.

Importing this package imports none of it.
"""
