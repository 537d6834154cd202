/* install DEST: copies the runtime to a folder, such as a volume of a pod.
 *
 * Linked statically: the image that it comes in has nothing but the runtime. Everything is readable
 * by everybody at the end, since the user's container may run as anyone.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SOURCE "/kubetorch"

static void fail(const char *what) {
    fprintf(stderr, "the runtime could not be copied: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void copy_file(int from, int to, const char *name, const struct stat *about) {
    int in = openat(from, name, O_RDONLY | O_CLOEXEC);
    int out = openat(to, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, about->st_mode & 0777);
    if (in < 0 || out < 0)
        fail(name);
    off_t left = about->st_size;
    while (left > 0) { /* in the kernel, where the file systems allow it */
        ssize_t count = copy_file_range(in, NULL, out, NULL, left, 0);
        if (count <= 0)
            break;
        left -= count;
    }
    static char buffer[1 << 18];
    while (left > 0) {
        ssize_t count = read(in, buffer, sizeof buffer);
        if (count < 0)
            fail(name);
        if (count == 0)
            break;
        for (ssize_t done = 0; done < count;) {
            ssize_t wrote = write(out, buffer + done, count - done);
            if (wrote < 0)
                fail(name);
            done += wrote;
        }
        left -= count;
    }
    if (close(out) < 0)
        fail(name);
    close(in);
}

static void copy_link(int from, int to, const char *name) {
    char target[4096];
    ssize_t length = readlinkat(from, name, target, sizeof target - 1);
    if (length < 0)
        fail(name);
    target[length] = 0;
    if (symlinkat(target, to, name) < 0 && errno != EEXIST)
        fail(name);
}

static void copy_folder(int from, int to) {
    DIR *folder = fdopendir(from);
    if (!folder)
        fail("a folder");
    struct dirent *entry;
    while ((entry = readdir(folder))) {
        const char *name = entry->d_name;
        struct stat about;
        if (!strcmp(name, ".") || !strcmp(name, ".."))
            continue;
        if (fstatat(from, name, &about, AT_SYMLINK_NOFOLLOW) < 0)
            fail(name);
        if (S_ISLNK(about.st_mode)) {
            copy_link(from, to, name);
        } else if (S_ISDIR(about.st_mode)) {
            if (mkdirat(to, name, 0755) < 0 && errno != EEXIST)
                fail(name);
            int in = openat(from, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            int out = openat(to, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            if (in < 0 || out < 0)
                fail(name);
            copy_folder(in, out);
            close(out);
        } else {
            copy_file(from, to, name, &about);
        }
    }
    closedir(folder);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: install DEST\n");
        return 64;
    }
    umask(0);
    int from = open(SOURCE, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int to = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (from < 0)
        fail(SOURCE);
    if (to < 0)
        fail(argv[1]);
    copy_folder(from, to);
    return 0;
}
