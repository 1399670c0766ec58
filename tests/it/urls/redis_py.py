"""Records how redis-py parses URLs: `pip install redis==8.1.0 && python3 redis_py.py > redis_py.tsv`. Read by ../urls.rs."""

import random

from redis.connection import parse_url

SCHEMES = ["redis://"] * 4 + ["unix://", "unix:///"]
LOGINS = ["", "", "u:p@", ":p@", "u@", ":@", "u:@", "u:p%40%2f@", "u:p:q@", "u:p@q@", "u:p/q@", "u:1#q@", "u:1?q@", "u:1/q@",
          "u:%zz@", "u:p+q@", "u:p%20q@", "u:ä@", "u:p;q,!$&'()*@", "u:p q@", "u:[p]@", "u%3ax:p@", "u:p\\q@", "u:%C3%A4@"]
HOSTS = ["h", "h", "h.i", "h_i", "127.0.0.1", "[::1]", "::1", "", "localhost", "h%41", "h:7", "h:07", "h:", "h:0", "[::1]:7", "h:7x"]
PATHS = ["", "", "/", "/3", "/03", "/3/", "//3", "/x", "/+3", "/-1", "/%33", "/run/s", "/run/%73", "/run/a@b", "/run/s%20t", "/3;x"]
QUERIES = ["", "", "", "", "?", "?db=4", "?db=x", "?db=4&db=5", "?username=v", "?password=q", "#x", "?db=4#x", "?db=%34", "?db=+4"]
KNOWN = {"host", "port", "username", "password", "db", "path", "connection_class"}

rng = random.Random(9)
seen = set()
while len(seen) < 600:
    url = "".join(rng.choice(pieces) for pieces in (SCHEMES, LOGINS, HOSTS, PATHS, QUERIES))
    if url in seen:
        continue
    seen.add(url)
    try:
        said = parse_url(url)
    except ValueError:
        continue
    # the parser accepts it, but the connections of redis-py do not
    if not set(said) <= KNOWN or not isinstance(said.get("db", 0), int):
        continue
    where = [said["path"], 0] if "path" in said else [said.get("host", "localhost"), said.get("port", 6379)]
    login = [said.get("username", ""), said.get("password", "")]
    print(url.replace("unix://", "redis+unix://"), *where, *login, said.get("db", 0), sep="\t")
