"""Images from elsewhere: what a name means, where it is fetched, what a manifest says, and how layers become files.

    reference.py    the words of a name, as Docker reads them (pure)
    manifest.py     what an index, a manifest and a config say (pure)
    hosts.py        mirrors, blocked and plain registries, of `registries.conf`
    logins.py       who we are there, of Docker's and the containers tools' files
    registry.py     fetches, over HTTP
    archive.py      the same out of files of this host
    inflate.py      gzip and zstd, as they come
    unpack.py       the program that writes files; it runs in a box

Nothing here knows a driver: `drivers/native/extract.py` puts the parts together.
"""
