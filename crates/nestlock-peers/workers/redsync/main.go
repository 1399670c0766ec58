// The redsync worker of the peers: speaks the protocol of ../README.md on stdin and stdout.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"net/url"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sys/unix"
)

var (
	locks *redsync.Redsync
	held  = map[string]*redsync.Mutex{}
)

// now is CLOCK_MONOTONIC in ns, which all processes of a machine share.
func now() int64 {
	var at unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &at); err != nil {
		panic(err)
	}
	return at.Nano()
}

// named waits as the library does by default, but without limit.
func named(name string) *redsync.Mutex {
	return locks.NewMutex(name, redsync.WithExpiry(30*time.Second), redsync.WithTries(math.MaxInt))
}

func connect(text string) (string, error) {
	address, err := url.Parse(text)
	if err != nil {
		return "", err
	}
	client := redis.NewClient(&redis.Options{Addr: address.Host})
	if err := client.Ping(context.Background()).Err(); err != nil {
		return "", err
	}
	locks = redsync.New(goredis.NewPool(client))
	version := ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, module := range info.Deps {
			if strings.Contains(module.Path, "redsync") {
				version = module.Version
			}
		}
	}
	return "connected " + strings.TrimPrefix(version, "v") + ", Go " + strings.TrimPrefix(runtime.Version(), "go"), nil
}

func unlock(mutex *redsync.Mutex) error {
	ok, err := mutex.Unlock()
	if err == nil && !ok {
		err = errors.New("not held any more")
	}
	return err
}

// all runs this many goroutines, and returns one of their errors.
func all(count int, run func(int) error) error {
	var group sync.WaitGroup
	failures := make(chan error, count)
	for number := 0; number < count; number++ {
		group.Add(1)
		go func(number int) {
			defer group.Done()
			if err := run(number); err != nil {
				failures <- err
			}
		}(number)
	}
	group.Wait()
	close(failures)
	return <-failures
}

func pairs(tasks int, limit time.Duration) (string, error) {
	samples := make([][]float64, tasks)
	start := time.Now()
	err := all(tasks, func(task int) error {
		mutex := named(fmt.Sprintf("pairs:%d", task))
		for {
			before := time.Now()
			if before.Sub(start) >= limit {
				return nil
			}
			if err := mutex.Lock(); err != nil {
				return err
			}
			if err := unlock(mutex); err != nil {
				return err
			}
			samples[task] = append(samples[task], float64(time.Since(before).Nanoseconds())/1e3)
		}
	})
	if err != nil {
		return "", err
	}
	elapsed := float64(time.Since(start).Nanoseconds()) / 1e3
	micros := slices.Concat(samples...)
	slices.Sort(micros)
	answer := fmt.Sprintf("pairs %d %f", len(micros), elapsed)
	for _, share := range []float64{0.5, 0.9, 0.99, 0.999} {
		answer += fmt.Sprintf(" %f", micros[int(float64(len(micros))*share)])
	}
	return answer, nil
}

func drain(name string, waiters int) (string, error) {
	first := named(name)
	if err := first.Lock(); err != nil {
		return "", err
	}
	done := make(chan error)
	go func() {
		done <- all(waiters, func(int) error {
			mutex := named(name)
			if err := mutex.Lock(); err != nil {
				return err
			}
			return unlock(mutex)
		})
	}()
	time.Sleep(400 * time.Millisecond) // until all of them wait
	start := time.Now()
	if err := unlock(first); err != nil {
		return "", err
	}
	err := <-done
	return fmt.Sprintf("drained %f", float64(time.Since(start).Nanoseconds())/1e3), err
}

func answer(words []string) (string, error) {
	number := func(at int) int {
		value, err := strconv.Atoi(words[at])
		if err != nil {
			panic(err)
		}
		return value
	}
	switch words[0] {
	case "connect":
		return connect(words[1])
	case "pairs":
		return pairs(number(1), time.Duration(number(2))*time.Millisecond)
	case "lock":
		mutex := named(words[1])
		if err := mutex.Lock(); err != nil {
			return "", err
		}
		at := now()
		held[words[1]] = mutex
		return fmt.Sprintf("locked %d", at), nil
	case "unlock":
		at := now()
		return fmt.Sprintf("unlocked %d", at), unlock(held[words[1]])
	case "drain":
		return drain(words[1], number(2))
	case "hold":
		for at := 0; at < number(1); at++ {
			name := fmt.Sprintf("hold:%d", at)
			held[name] = named(name)
			if err := held[name].Lock(); err != nil {
				return "", err
			}
		}
		return "held", nil
	case "free":
		for at := 0; held[fmt.Sprintf("hold:%d", at)] != nil; at++ {
			name := fmt.Sprintf("hold:%d", at)
			if err := unlock(held[name]); err != nil {
				return "", err
			}
			delete(held, name)
		}
		return "freed", nil
	}
	return "", errors.New("unknown")
}

func main() {
	requests := bufio.NewScanner(os.Stdin)
	for requests.Scan() {
		text, err := answer(strings.Split(requests.Text(), " "))
		if err != nil {
			text = "error " + strings.ReplaceAll(err.Error(), "\n", " ")
		}
		fmt.Println("@ " + text)
	}
}
