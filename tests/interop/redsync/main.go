// The redsync worker of the interop tests: speaks the protocol of ../README.md on stdin and stdout.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand"
	"net/url"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-redsync/redsync/v4"
	pools "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sys/unix"
)

var background = context.Background()

// worker has the connections of `connect` and the holds of `acquire`.
type worker struct {
	locks *redsync.Redsync
	// limited obeys the time limits that redsync sets, which go-redis ignores by default
	limited *redsync.Redsync
	first   *redis.Client
	held    map[string]*redsync.Mutex
}

// now is CLOCK_MONOTONIC in ns, which all processes of a machine share.
func now() int64 {
	var time unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &time); err != nil {
		panic(err)
	}
	return time.Nano()
}

func say(format string, parts ...any) {
	fmt.Println("@ " + strings.ReplaceAll(fmt.Sprintf(format, parts...), "\n", " "))
}

func pause(limit time.Duration, random *rand.Rand) {
	time.Sleep(time.Duration(random.Int63n(int64(limit) + 1)))
}

func (w *worker) connect(urls []string) error {
	servers, limited := make([]pools.Pool, 0, len(urls)), make([]pools.Pool, 0, len(urls))
	w.held = map[string]*redsync.Mutex{}
	for at, text := range urls {
		address, err := url.Parse(text)
		if err != nil {
			return err
		}
		// no hidden retries of a request that was sent
		client := redis.NewClient(&redis.Options{Addr: address.Host, MaxRetries: -1})
		if err := client.Ping(background).Err(); err != nil {
			return err
		}
		if at == 0 {
			w.first = client
		}
		servers = append(servers, goredis.NewPool(client))
		// it connects on first use
		bounded := redis.NewClient(&redis.Options{Addr: address.Host, MaxRetries: -1, ContextTimeoutEnabled: true})
		limited = append(limited, goredis.NewPool(bounded))
	}
	w.locks, w.limited = redsync.New(servers...), redsync.New(limited...)
	return nil
}

// taken reports whether the error means "held by another", rather than a failure.
func taken(err error) bool {
	var quorum *redsync.ErrTaken
	var node *redsync.ErrNodeTaken
	return errors.As(err, &quorum) || errors.As(err, &node) || errors.Is(err, redsync.ErrFailed)
}

// acquire returns nil for "busy". The library's own waiting cannot be limited in time without aborting a request in
// the middle, so the worker makes each attempt itself, unless the request wants the library's own waiting.
func (w *worker) acquire(name string, ttl time.Duration, wait string, owner string, random *rand.Rand) (*redsync.Mutex, error) {
	options := []redsync.Option{redsync.WithExpiry(ttl)}
	if owner != "" {
		options = append(options, redsync.WithGenValueFunc(func() (string, error) { return owner, nil }))
	}
	mutex := w.locks.NewMutex(name, options...)
	if wait == "own" {
		if err := mutex.LockContext(background); err == nil {
			return mutex, nil
		} else if taken(err) {
			return nil, nil
		} else {
			return nil, err
		}
	}
	limit, err := strconv.ParseInt(wait, 10, 64)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(time.Duration(limit) * time.Millisecond); ; {
		err := mutex.TryLockContext(background)
		if err == nil {
			return mutex, nil
		}
		if !time.Now().Before(deadline) {
			if taken(err) {
				return nil, nil
			}
			return nil, err
		}
		time.Sleep(time.Millisecond)
		pause(3*time.Millisecond, random)
	}
}

// release returns whether the lock was still held.
func release(mutex *redsync.Mutex) (bool, error) {
	held, err := mutex.UnlockContext(background)
	if held || err == nil || errors.Is(err, redsync.ErrLockAlreadyExpired) || taken(err) {
		return held, nil
	}
	return false, err
}

func (w *worker) run(name string, counter string, holds int, ttl time.Duration, random *rand.Rand) error {
	for range make([]struct{}, holds) {
		mutex, err := w.acquire(name, ttl, "60000", "", random)
		if err != nil {
			return err
		}
		if mutex == nil {
			return errors.New("busy for a minute")
		}
		start := now()
		count, err := w.first.Get(background, counter).Int64()
		if err != nil && err != redis.Nil {
			return err
		}
		pause(500*time.Microsecond, random)
		if err := w.first.Set(background, counter, count+1, 0).Err(); err != nil {
			return err
		}
		end := now()
		held, err := release(mutex)
		if err != nil {
			return err
		}
		if !held {
			return errors.New("lost in the middle of a hold")
		}
		say("hold %d %d", start, end)
		pause(2*time.Millisecond, random)
	}
	say("done %d", holds)
	return nil
}

// bench times acquire + release; each goroutine has its own lock. The limit applies to releases: redsync limits acquires
// itself.
func (w *worker) bench(name string, pairs int, workers int, ttl time.Duration, limit time.Duration) {
	locks := w.locks
	if limit > 0 {
		locks = w.limited
	}
	pair := func(mutex *redsync.Mutex) bool {
		if mutex.TryLockContext(background) != nil {
			return false
		}
		releasing := background
		if limit > 0 {
			bounded, cancel := context.WithTimeout(background, limit)
			defer cancel()
			releasing = bounded
		}
		held, _ := mutex.UnlockContext(releasing)
		return held
	}
	times, failed := make([]time.Duration, workers*pairs), make([]int, workers)
	var all sync.WaitGroup
	start := time.Now()
	for at := 0; at < workers; at++ {
		all.Add(1)
		go func(at int) {
			defer all.Done()
			mutex := locks.NewMutex(fmt.Sprintf("%s-%d", name, at), redsync.WithExpiry(ttl))
			for one := 0; one < pairs; one++ {
				begun := time.Now()
				if !pair(mutex) {
					failed[at]++
				}
				times[at*pairs+one] = time.Since(begun)
			}
		}(at)
	}
	all.Wait()
	elapsed, failures := time.Since(start), 0
	for _, some := range failed {
		failures += some
	}
	sort.Slice(times, func(a, b int) bool { return times[a] < times[b] })
	rate := float64(len(times)-failures) / elapsed.Seconds()
	say("benched %d %.2f %d", times[len(times)/2].Nanoseconds(), rate, failures)
}

func (w *worker) serve(words []string) error {
	milliseconds := func(word string) time.Duration {
		number, err := strconv.ParseInt(word, 10, 64)
		if err != nil {
			panic(err)
		}
		return time.Duration(number) * time.Millisecond
	}
	random := rand.New(rand.NewSource(now()))
	switch words[0] {
	case "connect":
		if err := w.connect(words[1:]); err != nil {
			return err
		}
		say("connected %d", now())
	case "acquire":
		owner := ""
		if len(words) > 4 {
			owner = words[4]
		}
		mutex, err := w.acquire(words[1], milliseconds(words[2]), words[3], owner, random)
		at := now()
		if err != nil {
			return err
		}
		if mutex == nil {
			say("busy %d", at)
			return nil
		}
		w.held[words[1]] = mutex
		say("acquired %d", at)
	case "adopt":
		w.held[words[1]] = w.locks.NewMutex(words[1], redsync.WithValue(words[2]))
		say("adopted %d", now())
	case "release":
		mutex := w.held[words[1]]
		delete(w.held, words[1])
		at := now()
		held, err := release(mutex)
		if err != nil {
			return err
		}
		if held {
			say("released %d", at)
		} else {
			say("lost %d", at)
		}
	case "extend":
		// the library extends by the mutex's expiry, so another expiry needs another mutex with the same value
		mutex := w.locks.NewMutex(words[1], redsync.WithValue(w.held[words[1]].Value()), redsync.WithExpiry(milliseconds(words[2])))
		at := now()
		held, err := mutex.ExtendContext(background)
		if held {
			w.held[words[1]] = mutex
			say("extended %d", at)
		} else if err == nil || taken(err) {
			say("lost %d", at)
		} else {
			return err
		}
	case "run":
		holds, err := strconv.Atoi(words[3])
		if err != nil {
			return err
		}
		seed, err := strconv.ParseInt(words[5], 10, 64)
		if err != nil {
			return err
		}
		return w.run(words[1], words[2], holds, milliseconds(words[4]), rand.New(rand.NewSource(seed)))
	case "bench":
		pairs, err := strconv.Atoi(words[2])
		if err != nil {
			return err
		}
		workers, err := strconv.Atoi(words[3])
		if err != nil {
			return err
		}
		w.bench(words[1], pairs, workers, milliseconds(words[4]), milliseconds(words[5]))
	default:
		return fmt.Errorf("unknown request %s", words[0])
	}
	return nil
}

func main() {
	w := &worker{}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		if err := w.serve(strings.Fields(lines.Text())); err != nil {
			say("error %v", err)
		}
	}
}
