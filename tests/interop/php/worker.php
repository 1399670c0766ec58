<?php
// The phpredis worker of the interop tests: speaks the protocol of ../README.md on stdin and stdout. It keeps the record
// of RedLock-Hyperf, as shared notes describe it: the package itself needs a framework and a server of its own.
declare(strict_types=1);

const RETRIES = 2;
const RETRY_DELAY_MS = 200;
const DRIFT_FACTOR = 0.01;

const RELEASE = <<<'LUA'
local lock, token = KEYS[1], ARGV[1]
if redis.call('get', lock) == token then return redis.call('del', lock) end
return 0
LUA;

const EXTEND = <<<'LUA'
local lock, token, ttl = KEYS[1], ARGV[1], ARGV[2]
if redis.call('get', lock) == token then return redis.call('pexpire', lock, ttl) end
return 0
LUA;

function now(): int
{
    return hrtime(true);
}

function say(string|int ...$parts): void
{
    fwrite(STDOUT, '@ ' . str_replace("\n", ' ', implode(' ', $parts)) . "\n");
}

function pause(int $from, int $to): void
{
    usleep(mt_rand($from, $to));
}

final class Worker
{
    /** @var Redis[] */
    private array $servers = [];
    /** @var array<string, string> name to token */
    private array $held = [];

    public function connect(string ...$urls): void
    {
        foreach ($urls as $url) {
            $server = new Redis();
            $server->connect(parse_url($url, PHP_URL_HOST), parse_url($url, PHP_URL_PORT));
            $this->servers[] = $server;
        }
        say('connected', now());
    }

    /** Calls each server in turn; a failure counts as no. Returns the number of yes. */
    private function count(callable $ask): int
    {
        $yes = 0;
        foreach ($this->servers as $server) {
            try {
                $yes += $ask($server) ? 1 : 0;
            } catch (RedisException) {
                continue;
            }
        }
        return $yes;
    }

    private function quorum(): int
    {
        return intdiv(count($this->servers), 2) + 1;
    }

    private function free(string $name, string $token): bool
    {
        return $this->count(fn (Redis $server) => $server->eval(RELEASE, [$name, $token], 1)) >= $this->quorum();
    }

    /** One round on all servers. */
    private function try(string $name, int $ttl, ?string $owner): ?string
    {
        $token = $owner ?? gethostname() . uniqid('', true);
        $start = now();
        $taken = $this->count(fn (Redis $server) => $server->set($name, $token, ['nx', 'px' => $ttl]));
        $validity = $ttl - (now() - $start) / 1e6 - ($ttl * DRIFT_FACTOR + 2);
        if ($taken >= $this->quorum() && $validity > 0) {
            return $token;
        }
        $this->free($name, $token);
        return null;
    }

    /** The token, or null if it is busy. */
    private function take(string $name, int $ttl, string $wait, ?string $owner = null): ?string
    {
        if ($wait === 'own') {
            for ($round = 0; $round < RETRIES; $round++) {
                if (($token = $this->try($name, $ttl, $owner)) !== null) {
                    return $token;
                }
                pause(RETRY_DELAY_MS * 500, RETRY_DELAY_MS * 1000);
            }
            return null;
        }
        $deadline = now() + (int) $wait * 1_000_000;
        while (($token = $this->try($name, $ttl, $owner)) === null && now() < $deadline) {
            pause(1000, 4000);
        }
        return $token;
    }

    public function acquire(string $name, string $ttl, string $wait, ?string $owner = null): void
    {
        $token = $this->take($name, (int) $ttl, $wait, $owner);
        $at = now();
        if ($token === null) {
            say('busy', $at);
            return;
        }
        $this->held[$name] = $token;
        say('acquired', $at);
    }

    public function adopt(string $name, string $owner): void
    {
        $this->held[$name] = $owner;
        say('adopted', now());
    }

    public function release(string $name): void
    {
        $token = $this->held[$name];
        unset($this->held[$name]);
        $at = now();
        say($this->free($name, $token) ? 'released' : 'lost', $at);
    }

    public function extend(string $name, string $ttl): void
    {
        $token = $this->held[$name];
        $at = now();
        $yes = $this->count(fn (Redis $server) => $server->eval(EXTEND, [$name, $token, $ttl], 1));
        say($yes >= $this->quorum() ? 'extended' : 'lost', $at);
    }

    public function run(string $name, string $counter, string $holds, string $ttl, string $seed): void
    {
        mt_srand((int) $seed);
        for ($hold = 0; $hold < (int) $holds; $hold++) {
            $token = $this->take($name, (int) $ttl, '60000');
            $start = now();
            if ($token === null) {
                throw new RuntimeException('busy for a minute');
            }
            $count = (int) $this->servers[0]->get($counter);
            pause(0, 500);
            $this->servers[0]->set($counter, (string) ($count + 1));
            $end = now();
            if (!$this->free($name, $token)) {
                throw new RuntimeException('lost in the middle of a hold');
            }
            say('hold', $start, $end);
            pause(0, 2000);
        }
        say('done', $holds);
    }
}

const REQUESTS = ['connect', 'acquire', 'adopt', 'release', 'extend', 'run'];

$worker = new Worker();
while (($line = fgets(STDIN)) !== false) {
    $words = explode(' ', trim($line));
    $request = array_shift($words);
    try {
        if (!in_array($request, REQUESTS, true)) {
            throw new RuntimeException("unknown request $request");
        }
        $worker->$request(...$words);
    } catch (Throwable $error) {
        say('error', $error::class, $error->getMessage());
    }
}
