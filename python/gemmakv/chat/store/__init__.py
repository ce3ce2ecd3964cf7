"""Where sessions are kept: records, a store's protocol, a folder of files."""

from gemmakv.chat.store._folder import FolderStore, folder_of
from gemmakv.chat.store._live import from_file, from_store
from gemmakv.chat.store._protocol import Listing, SaveTo, SessionStore
from gemmakv.chat.store._records import NewerRecord, Record
from gemmakv.chat.store._saver import Saver
from gemmakv.chat.store._tier import forget, keeps_keys, tokens_in

__all__ = [
    "FolderStore",
    "Listing",
    "NewerRecord",
    "Record",
    "SaveTo",
    "Saver",
    "SessionStore",
    "folder_of",
    "forget",
    "from_file",
    "from_store",
    "keeps_keys",
    "tokens_in",
]
